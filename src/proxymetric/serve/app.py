"""The service: search by images or by items, items, thumbnails, the map, and the web page."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import FastAPI, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Route

from proxymetric.arguments.signatures import did_you_mean
from proxymetric.search import Index
from proxymetric.search.column_facts import facts_of_columns
from proxymetric.search.conditions import as_conditions
from proxymetric.search.searching import SearchQuestion, checked_question
from proxymetric.serve import schemas
from proxymetric.serve.bodies import read_query, sentence, shortened
from proxymetric.serve.counters import FOLDER_VARIABLE, Counters
from proxymetric.serve.description import errors, identify_body, search_body
from proxymetric.serve.errors import CODES, Refused
from proxymetric.serve.guard import App, Guard
from proxymetric.serve.map_data import MapData
from proxymetric.serve.pipeline import LONGEST_SENTENCE, Pipeline
from proxymetric.serve.searcher import Question
from proxymetric.serve.settings import Settings
from proxymetric.serve.write_routes import add_write_routes
from proxymetric.system.version import __version__

PAGE_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "app.js": ("app.js", "text/javascript; charset=utf-8"),
    "filters.js": ("filters.js", "text/javascript; charset=utf-8"),
    "map.js": ("map.js", "text/javascript; charset=utf-8"),
    "proxies.js": ("proxies.js", "text/javascript; charset=utf-8"),
    "style.css": ("style.css", "text/css; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
"""path -> file of the page and its type"""
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
    counters = Counters(os.environ.get(FOLDER_VARIABLE))
    pipeline = Pipeline(settings, counters)
    searcher = pipeline.searcher
    placing, placed = asyncio.Lock(), dict[str, Any]()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with pipeline.running():
            yield

    app = FastAPI(
        title="proxymetric",
        summary="Search images by similarity.",
        version=__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # ids may have any
        lifespan=lifespan,
    )
    _add_errors(app)

    @app.post(
        "/search",
        openapi_extra=search_body(settings),
        responses=errors(400, 403, 404, 408, 413, 415, 422, 429, 503, 504),
    )
    async def post_search(request: Request) -> schemas.Results:
        """Find the items most similar to images (a form, or base64 in JSON) or to items of the index."""
        files, items, body = await read_query(request, settings, schemas.SearchBody)
        question = _search_question(searcher.index, settings, body)
        images = await pipeline.images(files) if files else None
        result = await pipeline.ask(Question(images, tuple(items), question))
        hits = [
            schemas.Hit(**_item(hit), rank=rank, similarity=hit.similarity)
            for rank, hit in enumerate(result.hits, body.offset + 1)
        ]
        return schemas.Results(results=hits, more=result.has_more, generation=result.generation)

    @app.post(
        "/identify",
        openapi_extra=identify_body(),
        responses=errors(400, 403, 404, 408, 413, 415, 422, 429, 503, 504),
    )
    async def post_identify(request: Request) -> schemas.Identified:
        """Say which class of the index is on an image (a form, or base64 in JSON) or an item, or none of them."""
        files, items, body = await read_query(request, settings, schemas.IdentifyBody)
        if len(files) > 1:
            raise Refused(422, f"image: got {len(files)} files, expected one")
        images = await pipeline.images(files) if files else None
        result = await pipeline.ask(Question(images, tuple(items), far=body.far))
        assert result.answer is not None
        return schemas.Identified(**result.answer._asdict(), far=body.far, generation=result.generation)

    @app.get("/items/{id:path}", responses=errors(404, 422))
    async def get_item(id: ItemId) -> schemas.Item:
        """Return an item by its id."""
        return schemas.Item(**_item(_known(searcher.index, id)))

    @app.get("/rows/{row}", responses=errors(404, 422))
    async def get_row(row: Annotated[int, Path(ge=0, description="Number of a point of the map.")]) -> schemas.Item:
        """Return the item of a point of the map."""
        try:
            return schemas.Item(**_item(searcher.index.at(row)))
        except IndexError as error:
            raise Refused(404, str(error)) from None

    @app.get(
        "/thumbnails/{id:path}",
        response_class=Response,
        responses=errors(404, 422) | {200: {"content": {"image/jpeg": {}}}},
    )
    async def get_thumbnail(id: ItemId) -> Response:
        """Return the thumbnail of an item, as JPEG."""
        _known(searcher.index, id)
        content = searcher.index.thumbnail(id)
        if content is None:
            raise Refused(404, f"thumbnail: got the item {id!r}, which has none")
        return Response(content, media_type="image/jpeg", headers={"cache-control": "private, max-age=300"})

    @app.get("/map", responses=errors(404))
    async def get_map() -> schemas.MapInfo:
        """Describe the map of the index."""
        return map_data(searcher.index).info

    @app.get(
        "/map/points",
        response_class=Response,
        responses=errors(404) | {200: {"content": {"application/octet-stream": {}}}},
    )
    async def get_points() -> Response:
        """Return the points of the map: for each, x, y and the number of its class (-1: none), as float32."""
        return Response(map_data(searcher.index).table, media_type="application/octet-stream")

    @app.get("/map/proxies", responses=errors(404))
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

    @functools.lru_cache(maxsize=1)
    def columns(index: Index) -> list[schemas.Column]:
        return [schemas.Column(**facts._asdict()) for facts in facts_of_columns(index.store)]

    @app.get("/info")
    async def get_info() -> schemas.Info:
        """Describe the index and the limits of the service."""
        index = searcher.index
        limits = schemas.Limits(bytes=settings.max_bytes, pixels=settings.max_pixels, results=settings.max_results)
        return schemas.Info(
            count=len(index),
            dim=index.dim,
            model=index.model,
            engine=index.engine.name,
            columns=await asyncio.to_thread(columns, index),
            generation=index.manifest.generation,
            writable=bool(settings.write_token),
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

    if settings.write_token:
        add_write_routes(app, pipeline)
    for path, (file, kind) in PAGE_FILES.items():
        app.add_api_route(f"/{path}", _file(file, kind), include_in_schema=False)
    return Guard(app, settings, counters)


def _search_question(index: Index, settings: Settings, body: schemas.SearchBody) -> SearchQuestion:
    """Check what is asked of a search.

    Raises:
        Refused: it cannot be asked of this index.
    """
    if body.k > settings.max_results:
        raise Refused(422, f"k: got {body.k}, expected at most {settings.max_results}")
    if body.where is not None and not isinstance(body.where, dict | list):
        raise Refused(422, f"where: got {body.where!r:.100}, expected an object or a list of conditions")
    texts = body.where if isinstance(body.where, list) else []
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise Refused(422, f"where: got {wrong[0]!r:.100}, expected text such as 'price<50'")
    try:
        conditions = as_conditions(body.where)
        if len(conditions) > schemas.MOST_CONDITIONS:
            raise Refused(422, f"where: got {len(conditions)} conditions, expected at most {schemas.MOST_CONDITIONS}")
        return checked_question(
            index.manifest.columns, body.k, conditions, None, body.offset, body.min_similarity, body.one_per
        )
    except ValueError as error:
        raise Refused(422, shortened(str(error), LONGEST_SENTENCE)) from None


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
        return answer(Refused(422, sentence(error.errors())))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        status = error.status_code if error.status_code in CODES else 400
        headers, path = dict(error.headers or {}), request.url.path
        message = f"{request.method} request: {error.detail}"
        if status == 405:
            methods = headers["Allow"] = ", ".join(_methods(app, request.scope["path"]))
            message = f"method: got {request.method[:20]} for {path[:200]!r}, expected {methods}"
        elif status == 404:
            message = _unknown_path(app, path)
        return answer(Refused(status, message, headers=headers))


def _methods(app: FastAPI, path: str) -> list[str]:
    """The methods of a path, of all routes that it has."""
    routes = [route for route in app.routes if isinstance(route, Route | APIRoute) and route.path_regex.match(path)]
    return sorted({method for route in routes for method in route.methods or ()})


def _unknown_path(app: FastAPI, path: str) -> str:
    """Name the paths of the service, and the one that is most similar to an unknown path."""
    known = ["/", *app.openapi()["paths"], "/openapi.json"]
    starts = [name.split("/{")[0] for name in known]
    hint = did_you_mean(path, known) or did_you_mean(f"/{path.split('/')[1]}", starts)
    return f"path: got {path[:200]!r}, expected one of {', '.join(known)}{hint}"
