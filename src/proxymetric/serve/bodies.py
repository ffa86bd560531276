"""The bodies of requests: read from a form or from JSON, checked, and refused with a sentence."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from proxymetric.arguments.signatures import did_you_mean
from proxymetric.serve import schemas
from proxymetric.serve.errors import Refused
from proxymetric.serve.settings import Settings

MAX_SAID = 100
"""letters of a wrong value that an error repeats"""
EXPECTED = {
    "greater_than_equal": "a number of at least {ge}",
    "less_than_equal": "a number of at most {le}",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "an object of columns and values",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "missing": "it",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
}
"""type of an error of pydantic -> what was expected"""
Body = TypeVar("Body", bound=BaseModel)


async def read_query(request: Request, settings: Settings, form: type[Body]) -> tuple[list[bytes], list[str], Body]:
    """Read a question: its images or the ids of its items, one kind of them, and the rest."""
    files, body = await read_body(request, form)
    given = body.model_fields_set
    names = [name for name in ("image", "images", "id", "ids") if name in form.model_fields]
    if len(given.intersection(names)) + bool(files) != 1:
        several = f"{', '.join(f'`{name}`' for name in names[:-1])} and `{names[-1]}`"
        raise Refused(422, f"body: got several or none of {several}, expected exactly one of them")
    for name in given.intersection(("image", "images")):
        value = getattr(body, name)
        files = [decoded(text, name) for text in ([value] if name == "image" else value)]
    check_sizes(files, settings)
    for name in given.intersection(("id", "ids")):
        value = getattr(body, name)
        return [], [value] if name == "id" else list(value), body
    return files, [], body


async def read_body(request: Request, form: type[Body]) -> tuple[list[bytes], Body]:
    """Read the files of a form and the rest of it; or JSON, which has no files."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    try:
        if kind == "multipart/form-data":
            files, values = await _read_form(request)
        elif kind == "application/json":
            files, values = [], await _read_json(request)
        else:
            raise Refused(415, f"content-type: got {kind[:100]!r}, expected multipart/form-data or application/json")
    except ClientDisconnect:  # nobody reads the answer, but it counts
        raise Refused(400, "body: got a part of it, expected all of it") from None
    try:
        return files, form.model_validate(values, strict=kind == "application/json")
    except ValidationError as error:
        known = [field.alias or name for name, field in form.model_fields.items()]
        raise Refused(422, sentence(error.errors(), known)) from None


def decoded(text: str, argument: str = "image") -> bytes:
    """Read base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(422, f"{argument}: got text that is not base64, expected an image in base64") from None


def check_sizes(files: Sequence[bytes], settings: Settings) -> None:
    """Refuse an image file that is too large."""
    for content in files:
        if len(content) > settings.max_bytes:
            raise Refused(413, f"image: got {len(content):,} bytes, expected at most {settings.max_bytes:,}")


def sentence(errors: Any, known: Sequence[str] = ()) -> str:
    """The first of pydantic's errors as a sentence; `known` are the names that a body may have.

    Example:
        >>> sentence([{"type": "greater_than_equal", "loc": ("k",), "msg": "", "input": -1, "ctx": {"ge": 1}}])
        'k: got -1, expected a number of at least 1'
    """
    first = errors[0]
    place = ".".join(str(part)[:100] for part in first["loc"] if part not in ("body", "path", "query")) or "body"
    if first["type"] == "extra_forbidden":
        return f"body: got {place!r}, expected only {', '.join(known)}{did_you_mean(place, known)}"
    got = first.get("input")
    value = f"a {type(got).__name__}" if isinstance(got, dict | list) else shortened(repr(got))
    if first["type"] == "missing":
        value = "nothing"
    words = EXPECTED.get(first["type"], "")
    expected = words.format(**first.get("ctx", {})) if words else f"another value: {first['msg']}"
    return f"{place}: got {value}, expected {expected}"


def shortened(text: str, most: int = MAX_SAID) -> str:
    """Cut what an error repeats.

    Example:
        >>> shortened("abcdef", 3)
        'abc...'
    """
    return text if len(text) <= most else f"{text[:most]}..."


async def _read_form(request: Request) -> tuple[list[bytes], dict[str, Any]]:
    try:
        form = await request.form(max_files=schemas.MOST_QUERIES, max_fields=32, max_part_size=65_536)
    except HTTPException as error:
        raise Refused(
            400, f"form: got one that cannot be read ({error.detail}), expected multipart/form-data"
        ) from None
    values: dict[str, Any] = {}
    files = []
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name != "image":
                raise Refused(422, f"form: got the file {name[:100]!r}, expected `image`")
            files.append(await value.read())
        elif name == "image":
            raise Refused(422, "image: got text, expected a file")
        elif name == "where" and value.startswith("{") and name not in values:
            values[name] = _object(value, name)
        elif name == "where" and isinstance(values.setdefault(name, []), list):
            values[name].append(value)
        elif name == "where":
            raise Refused(422, "where: got a JSON object and more, expected one of them")
        elif name == "metadata":
            values[name] = _object(value, name)
        else:
            values[name] = value
    await form.close()
    return files, values


async def _read_json(request: Request) -> dict[str, Any]:
    return _object(await request.body(), "body")


def _object(text: str | bytes, argument: str) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise Refused(400, f"{argument}: got text that is not JSON, expected a JSON object") from None
    if not isinstance(content, dict):
        raise Refused(422, f"{argument}: got {type(content).__name__}, expected a JSON object")
    return content
