"""The service: search by an image or by an item, items, thumbnails, the map, and the web page."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import functools
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from fastapi import FastAPI, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from proxymetric.arguments.signatures import did_you_mean
from proxymetric.data.decoding import BadImage
from proxymetric.data.image_bytes import TooManyPixels
from proxymetric.search import Index
from proxymetric.search.conditions import CLASS_COLUMN
from proxymetric.serve import schemas
from proxymetric.serve.batching import Batcher
from proxymetric.serve.counters import FOLDER_VARIABLE, Counters
from proxymetric.serve.decoders import Decoders, Stopped
from proxymetric.serve.errors import CODES, Refused
from proxymetric.serve.guard import App, Guard
from proxymetric.serve.map_data import MapData
from proxymetric.serve.searcher import Found, Question, Searcher, UnknownItem
from proxymetric.serve.settings import Settings
from proxymetric.system.version import __version__

PAGE_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "app.js": ("app.js", "text/javascript; charset=utf-8"),
    "map.js": ("map.js", "text/javascript; charset=utf-8"),
    "proxies.js": ("proxies.js", "text/javascript; charset=utf-8"),
    "style.css": ("style.css", "text/css; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
"""path -> file of the page and its type"""
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
    "dict_type": "an object of columns and values",
    "too_long": "at most {max_length} entries",
}
"""type of an error of pydantic -> what was expected"""
DECODERS = min(4, os.cpu_count() or 1)
"""images that are decoded at the same time, each in a process: it may need some bytes for each of `max_pixels`"""
Body = TypeVar("Body", schemas.SearchBody, schemas.IdentifyBody)
ItemId = Annotated[str, Path(description="The id of an item, as in results; slashes are part of it.")]


def create_app(settings: Settings) -> App:
    """Make the service for an index.

    Args:
        settings: the index and the limits.

    Returns:
        An ASGI application.

    Raises:
        ValueError: the index or its model cannot be opened.
    """
    decoders = Decoders(DECODERS, settings.max_pixels, settings.decode_seconds)
    decoders.warm_up()  # while the model is loaded
    try:
        searcher = Searcher(settings.index, settings.run, settings.device)
    except BaseException:
        decoders.close()
        raise
    counters = Counters(os.environ.get(FOLDER_VARIABLE))
    batcher: Batcher[Question, Found] = Batcher(searcher.answer, settings.max_batch, counters.batched)
    waiting = ThreadPoolExecutor(DECODERS, thread_name_prefix="decode")
    placing, placed = asyncio.Lock(), dict[str, Any]()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        keeping_up = asyncio.create_task(searcher.keep_up())
        async with batcher:
            yield
        keeping_up.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping_up
        decoders.close()
        waiting.shutdown(wait=True, cancel_futures=True)

    app = FastAPI(
        title="proxymetric",
        summary="Search images by similarity.",
        version=__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    _add_errors(app)

    async def search(question: Question) -> Found:
        try:
            async with asyncio.timeout(settings.seconds):
                return await batcher(question)
        except TimeoutError:
            raise Refused(504, f"search: got no answer within {settings.seconds:g} s, expected one") from None
        except UnknownItem as error:
            raise Refused(404, str(error)) from None
        except ValueError as error:
            raise Refused(422, str(error)) from None

    async def pixels(content: bytes) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(
                waiting, lambda: searcher.cut(decoders.decode(content))
            )
        except Stopped:
            raise Refused(503, "service: is stopping, expected one that runs") from None
        except TooManyPixels as error:
            raise Refused(413, str(error), "too_many_pixels") from None
        except BadImage as error:
            raise Refused(422, str(error), "bad_image") from None

    @app.post(
        "/search",
        openapi_extra=_search_body(settings, searcher.index.manifest.columns),
        responses=_errors(400, 403, 404, 408, 413, 415, 422, 429, 503, 504),
    )
    async def post_search(request: Request) -> schemas.Results:
        """Find the items most similar to an image (a form, or base64 in JSON) or to an item of the index."""
        content, body = await _read(request, settings, schemas.SearchBody)
        if body.k > settings.max_results:
            raise Refused(422, f"k: got {body.k}, expected at most {settings.max_results}")
        image = None if content is None else await pixels(content)
        result = await search(
            Question(image, None if content is not None else body.id, body.k, tuple(sorted(body.where.items())))
        )
        hits = [
            schemas.Hit(**_item(hit), rank=rank, similarity=hit.similarity) for rank, hit in enumerate(result.hits, 1)
        ]
        return schemas.Results(results=hits, generation=result.generation)

    @app.post(
        "/identify",
        openapi_extra=_identify_body(),
        responses=_errors(400, 403, 404, 408, 413, 415, 422, 429, 503, 504),
    )
    async def post_identify(request: Request) -> schemas.Identified:
        """Say which class of the index is on an image (a form, or base64 in JSON) or an item, or none of them."""
        content, body = await _read(request, settings, schemas.IdentifyBody)
        image = None if content is None else await pixels(content)
        result = await search(Question(image, None if content is not None else body.id, 1, (), body.far))
        assert result.answer is not None
        return schemas.Identified(**result.answer._asdict(), far=body.far, generation=result.generation)

    @app.get("/items/{id:path}", responses=_errors(404, 422))
    async def get_item(id: ItemId) -> schemas.Item:
        """Return an item by its id."""
        return schemas.Item(**_item(_known(searcher.index, id)))

    @app.get("/rows/{row}", responses=_errors(404, 422))
    async def get_row(row: Annotated[int, Path(ge=0, description="Number of a point of the map.")]) -> schemas.Item:
        """Return the item of a point of the map."""
        try:
            return schemas.Item(**_item(searcher.index.at(row)))
        except IndexError as error:
            raise Refused(404, str(error)) from None

    @app.get(
        "/thumbnails/{id:path}",
        response_class=Response,
        responses=_errors(404, 422) | {200: {"content": {"image/jpeg": {}}}},
    )
    async def get_thumbnail(id: ItemId) -> Response:
        """Return the thumbnail of an item, as JPEG."""
        _known(searcher.index, id)
        content = searcher.index.thumbnail(id)
        if content is None:
            raise Refused(404, f"thumbnail: got the item {id!r}, which has none")
        return Response(content, media_type="image/jpeg", headers={"cache-control": "private, max-age=300"})

    @app.get("/map", responses=_errors(404))
    async def get_map() -> schemas.MapInfo:
        """Describe the map of the index."""
        return map_data(searcher.index).info

    @app.get(
        "/map/points",
        response_class=Response,
        responses=_errors(404) | {200: {"content": {"application/octet-stream": {}}}},
    )
    async def get_points() -> Response:
        """Return the points of the map: for each, x, y and the number of its class (-1: none), as float32."""
        return Response(map_data(searcher.index).table, media_type="application/octet-stream")

    @app.get("/map/proxies", responses=_errors(404))
    async def get_proxies() -> schemas.MapProxies:
        """Return the proxies of the run that made the index, placed on the map; none if the run has none."""
        state = searcher.state
        data = map_data(state.index)
        async with placing:  # the first request computes them, others wait for it
            if data.index is not placed.get("index"):
                proxies = await asyncio.to_thread(lambda: data.with_proxies(searcher.proxies(state)))
                placed.update(index=data.index, proxies=proxies)
            return placed["proxies"]

    @functools.lru_cache(maxsize=1)
    def map_data(index: Index) -> MapData:
        if index.points is None:
            raise Refused(404, "map: the index has none; expected an index made with `--map tsne` or `--map pca`")
        return MapData(index)

    @app.get("/info")
    async def get_info() -> schemas.Info:
        """Describe the index and the limits of the service."""
        index = searcher.index
        limits = schemas.Limits(bytes=settings.max_bytes, pixels=settings.max_pixels, results=settings.max_results)
        return schemas.Info(
            count=len(index),
            dim=index.dim,
            engine=index.engine.name,
            columns=index.manifest.columns,
            generation=index.manifest.generation,
            limits=limits,
        )

    @app.get("/healthz", response_model_exclude_none=True)
    async def get_health() -> schemas.Health:
        """Say that the service can answer, and whether it answers from an earlier state of the index."""
        return schemas.Health(status="ok", items=len(searcher.index), stale=searcher.stale)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics() -> PlainTextResponse:
        """Return the counters of the service for Prometheus."""
        return PlainTextResponse(counters.text(len(searcher.index)), media_type="text/plain; version=0.0.4")

    for path, (file, kind) in PAGE_FILES.items():
        app.add_api_route(f"/{path}", _file(file, kind), include_in_schema=False)
    return Guard(app, settings, counters)


async def _read(request: Request, settings: Settings, form: type[Body]) -> tuple[bytes | None, Body]:
    """Read the image, if there is one, and the rest of a question, from a form or from JSON."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    try:
        if kind == "multipart/form-data":
            content, values = await _read_form(request)
        elif kind == "application/json":
            content, values = None, await _read_json(request)
        else:
            raise Refused(415, f"content-type: got {kind[:100]!r}, expected multipart/form-data or application/json")
    except ClientDisconnect:  # nobody reads the answer, but it counts
        raise Refused(400, "body: got a part of it, expected all of it") from None
    try:
        body = form.model_validate(values, strict=kind == "application/json")
    except ValidationError as error:
        raise Refused(422, _sentence(error.errors(), list(form.model_fields))) from None
    if "image" in body.model_fields_set:
        try:
            content = base64.b64decode(body.image, validate=True)
        except (binascii.Error, ValueError):
            raise Refused(422, "image: got text that is not base64, expected an image in base64") from None
    if (content is None) == ("id" not in body.model_fields_set):
        raise Refused(422, "body: got both or neither of `image` and `id`, expected exactly one of them")
    if content is not None and len(content) > settings.max_bytes:
        raise Refused(413, f"image: got {len(content):,} bytes, expected at most {settings.max_bytes:,}")
    return content, body


async def _read_form(request: Request) -> tuple[bytes | None, dict[str, Any]]:
    try:
        form = await request.form(max_files=1, max_fields=16, max_part_size=65_536)
    except HTTPException as error:
        raise Refused(
            400, f"form: got one that cannot be read ({error.detail}), expected multipart/form-data"
        ) from None
    values: dict[str, Any] = {}
    content = None
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name != "image":
                raise Refused(422, f"form: got the file {name[:100]!r}, expected `image`")
            content = await value.read()
        elif name == "where":
            column, equals, text = value.partition("=")
            if not equals:
                raise Refused(422, f"where: got {value[:100]!r}, expected COLUMN=VALUE")
            if column in values.get("where", {}):
                raise Refused(422, f"where: got {column[:100]!r} twice, expected each column once")
            values.setdefault("where", {})[column] = text
        elif name == "image":
            raise Refused(422, "image: got text, expected a file")
        else:
            values[name] = value
    await form.close()
    return content, values


async def _read_json(request: Request) -> dict[str, Any]:
    try:
        content = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise Refused(400, "body: got text that is not JSON, expected a JSON object") from None
    if not isinstance(content, dict):
        raise Refused(422, f"body: got {type(content).__name__}, expected a JSON object")
    return content


def _known(index: Index, item: str) -> Any:
    try:
        return index[item]
    except KeyError:
        raise Refused(404, f"id: got {item[:200]!r}, expected the id of an item of the index") from None


def _item(item: Any) -> dict[str, Any]:
    return {
        "id": item.id,
        "label": item.label,
        "metadata": item.metadata,
        "thumbnail": f"/thumbnails/{quote(item.id)}",
        "row": item.row,
    }


def _file(name: str, kind: str) -> Callable[[], Any]:
    content = resources.files("proxymetric.serve").joinpath("page", name).read_bytes()

    async def get_file() -> Response:
        return Response(content, headers={"content-type": kind, "cache-control": "no-cache"})

    return get_file


def _sentence(errors: Any, known: Sequence[str] = ()) -> str:
    """The first of pydantic's errors as a sentence; `known` are the names that a body may have.

    Example:
        >>> _sentence([{"type": "greater_than_equal", "loc": ("k",), "msg": "", "input": -1, "ctx": {"ge": 1}}])
        'k: got -1, expected a number of at least 1'
    """
    first = errors[0]
    place = ".".join(str(part)[:100] for part in first["loc"] if part not in ("body", "path", "query")) or "body"
    if first["type"] == "extra_forbidden":
        return f"body: got {place!r}, expected only {', '.join(known)}{did_you_mean(place, known)}"
    got = first.get("input")
    value = f"a {type(got).__name__}" if isinstance(got, dict | list) else repr(got)
    if len(value) > MAX_SAID:
        value = f"{value[:MAX_SAID]}..."
    words = EXPECTED.get(first["type"], "")
    expected = words.format(**first.get("ctx", {})) if words else f"another value: {first['msg']}"
    return f"{place}: got {value}, expected {expected}"


def _add_errors(app: FastAPI) -> None:
    """All errors have one form."""

    def answer(refusal: Refused) -> JSONResponse:
        return JSONResponse(refusal.content(), refusal.status, refusal.headers)

    @app.exception_handler(Refused)
    async def refuse(request: Request, error: Refused) -> JSONResponse:
        return answer(error)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return answer(Refused(500, "service: got an error that is described in its log"))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(Refused(422, _sentence(error.errors())))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        status = error.status_code if error.status_code in CODES else 400
        headers, path = dict(error.headers or {}), request.url.path
        message = f"{request.method} request: {error.detail}"
        if status == 405:
            methods = next((value for name, value in headers.items() if name.lower() == "allow"), "another method")
            message = f"method: got {request.method[:20]} for {path[:200]!r}, expected {methods}"
        elif status == 404:
            message = _unknown_path(app, path)
        return answer(Refused(status, message, headers=headers))


def _unknown_path(app: FastAPI, path: str) -> str:
    """Name the paths of the service, and the one that is most similar to an unknown path."""
    known = ["/", *app.openapi()["paths"], "/openapi.json"]
    starts = [name.split("/{")[0] for name in known]
    hint = did_you_mean(path, known) or did_you_mean(f"/{path.split('/')[1]}", starts)
    return f"path: got {path[:200]!r}, expected one of {', '.join(known)}{hint}"


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": schemas.Error, "description": CODES[status]} for status in (401, 421, 500, *statuses)}


def _search_body(settings: Settings, columns: list[str]) -> dict[str, Any]:
    """The forms of the body of a search, for OpenAPI."""
    properties = schemas.SearchBody.model_json_schema()["properties"]
    names = [CLASS_COLUMN, *columns]
    k = properties["k"] | {"maximum": settings.max_results}
    where = properties["where"] | {"propertyNames": {"enum": names}}
    pairs = {"type": "string", "pattern": f"^({'|'.join(map(re.escape, names))})="}
    as_json = []
    for name in ("image", "id"):
        text = {"type": "string", "description": properties[name]["description"]}
        fields = {name: text, "k": k, "where": where}
        as_json.append({"type": "object", "required": [name], "additionalProperties": False, "properties": fields})
    form = {
        "type": "object",
        "required": ["image"],
        "additionalProperties": False,
        "properties": {
            "image": {"type": "string", "format": "binary", "description": "An image file."},
            "k": k,
            "where": {"type": "array", "maxItems": 8, "items": pairs, "description": "COLUMN=VALUE, repeatable."},
        },
    }
    content = {"multipart/form-data": {"schema": form}, "application/json": {"schema": {"oneOf": as_json}}}
    return {"requestBody": {"required": True, "content": content}}


def _identify_body() -> dict[str, Any]:
    """The forms of the body of a question for the class, for OpenAPI."""
    properties = schemas.IdentifyBody.model_json_schema()["properties"]
    as_json = []
    for name in ("image", "id"):
        text = {"type": "string", "description": properties[name]["description"]}
        fields = {name: text, "far": properties["far"]}
        as_json.append({"type": "object", "required": [name], "additionalProperties": False, "properties": fields})
    image = {"type": "string", "format": "binary", "description": "An image file."}
    form = {
        "type": "object",
        "required": ["image"],
        "additionalProperties": False,
        "properties": {"image": image, "far": properties["far"]},
    }
    content = {"multipart/form-data": {"schema": form}, "application/json": {"schema": {"oneOf": as_json}}}
    return {"requestBody": {"required": True, "content": content}}
