"""The bodies of requests and their errors, for the OpenAPI description."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from proxymetric.serve import schemas
from proxymetric.serve.errors import CODES
from proxymetric.serve.settings import Settings

IMAGE_FILE = {"type": "string", "format": "binary", "description": "An image file."}
CONDITION = {"type": "string", "pattern": "^[^<>=!]+(!=|<=|>=|=|<|>)", "description": "Such as `price<50`; repeatable."}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route, besides those that every route may answer with."""
    return {status: {"model": schemas.Error, "description": CODES[status]} for status in (401, 421, 500, *statuses)}


def search_body(settings: Settings) -> dict[str, Any]:
    """The forms of the body of a search."""
    properties = _properties(schemas.SearchBody)
    rest = {name: properties[name] for name in ("offset", "min_similarity", "one_per")}
    rest["k"] = properties["k"] | {"maximum": settings.max_results}
    conditions = {"type": "array", "maxItems": schemas.MOST_CONDITIONS, "items": CONDITION}
    where = {"description": properties["where"]["description"], "anyOf": [{"type": "object"}, conditions]}
    as_json = [
        _object([name], {name: properties[name], "where": where, **rest}) for name in ("image", "images", "id", "ids")
    ]
    files = {"type": "array", "items": IMAGE_FILE, "minItems": 1, "maxItems": schemas.MOST_QUERIES}
    where = {
        "description": "Conditions such as `price<50`, one in each field; or a JSON object as in the JSON body.",
        "anyOf": [conditions, {"type": "string", "contentMediaType": "application/json"}],
    }
    return _body(_object(["image"], {"image": files, "where": where, **rest}), {"oneOf": as_json})


def identify_body() -> dict[str, Any]:
    """The forms of the body of a question for the class."""
    properties = _properties(schemas.IdentifyBody)
    as_json = [_object([name], {name: properties[name], "far": properties["far"]}) for name in ("image", "id")]
    return _body(_object(["image"], {"image": IMAGE_FILE, "far": properties["far"]}), {"oneOf": as_json})


def put_body() -> dict[str, Any]:
    """The forms of an item that is written."""
    properties = _properties(schemas.PutBody)
    rest = {name: properties[name] for name in ("class", "metadata")}
    by_vector = {"vector": properties["vector"] | {"minItems": 1}, "model": properties["model"]}
    as_json = [
        _object(["image"], {"image": properties["image"], **rest}),
        _object(["vector", "model"], {**by_vector, **rest}),
    ]
    metadata = {"type": "string", "description": "A JSON object of columns and values."}
    form = _object(["image"], {"image": IMAGE_FILE, "class": {"type": "string"}, "metadata": metadata})
    return _body(form, {"oneOf": as_json})


def patch_body() -> dict[str, Any]:
    """What changes of an item."""
    return _body(None, _object([], _properties(schemas.PatchBody)))


def bulk_body() -> dict[str, Any]:
    """Several changes."""
    properties = _properties(schemas.BulkBody)
    for name, model in (("put", schemas.PutItem), ("patch", schemas.PatchItem)):
        content = model.model_json_schema()
        properties[name]["items"] = _object(content["required"], content["properties"])
    return _body(None, _object([], properties))


def _properties(model: type[BaseModel]) -> dict[str, Any]:
    properties: dict[str, Any] = model.model_json_schema()["properties"]
    return properties


def _object(required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


def _body(form: dict[str, Any] | None, as_json: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": as_json}}
    if form is not None:
        content["multipart/form-data"] = {"schema": form}
    return {"requestBody": {"required": True, "content": content}}
