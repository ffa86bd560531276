"""The routes that change the index; a service has them only with a write token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import torch
from fastapi import FastAPI, Path, Request

from proxymetric.search.batches import new_items
from proxymetric.serve import schemas
from proxymetric.serve.bodies import check_sizes, decoded, read_body, shortened
from proxymetric.serve.description import bulk_body, errors, patch_body, put_body
from proxymetric.serve.errors import Refused
from proxymetric.serve.pipeline import LONGEST_SENTENCE, Pipeline
from proxymetric.serve.writing import Patch, Put, Write

ItemId = Annotated[str, Path(description="The id of an item: printable text; slashes are part of it.")]
BODY_ERRORS = (400, 403, 408, 413, 415, 422, 429, 503, 504, 507)


def add_write_routes(app: FastAPI, pipeline: Pipeline) -> None:
    """Add the routes that change the index."""
    settings = pipeline.settings

    async def written(write: Write) -> schemas.Written:
        return schemas.Written(**(await pipeline.write(write))._asdict())

    async def put_of(item: str, body: schemas.PutBody, files: Sequence[bytes]) -> Put:
        """Make an item of an image, which is embedded, or of a vector."""
        metadata = {column: value for column, value in body.metadata.items() if value is not None}
        given = body.model_fields_set
        contents = [*files, *([decoded(body.image)] if "image" in given else [])]
        if len(contents) + ("vector" in given) != 1:
            raise Refused(422, "body: got several or none of `image` and `vector`, expected exactly one of them")
        if ("vector" in given) != ("model" in given):
            raise Refused(422, "body: got one of `vector` and `model`, expected both: /info names the model")
        if contents:
            check_sizes(contents, settings)
            _check(item, torch.ones(1, 1), 1, body.label, metadata)  # before it is decoded
            embedding, thumbnail = await pipeline.embedded(contents[0])
            return Put(item, embedding.vector, embedding.model, body.label, metadata, thumbnail)
        model = pipeline.searcher.index.model
        if body.model != model:
            raise Refused(422, f"model: got {body.model[:100]!r}, expected {model!r}, which made the other vectors")
        vector = torch.tensor([body.vector], dtype=torch.float64)
        largest = vector.abs().amax() if body.vector else torch.tensor(0.0)
        if not largest > 0:
            raise Refused(422, "vector: got one without a direction, expected a number that is not 0")
        _check(item, vector, pipeline.searcher.index.dim, body.label, metadata)
        return Put(item, vector / largest, model, body.label, metadata, None)

    async def named(item: schemas.PutItem) -> Put:
        """Make one of several items; a mistake says in which one it is."""
        try:
            return await put_of(item.id, item, ())
        except Refused as refusal:
            message = f"item {item.id[:200]!r}: {refusal.message}"
            raise Refused(refusal.status, message, refusal.code, refusal.headers) from None

    @app.put("/items/{id:path}", openapi_extra=put_body(), responses=errors(404, *BODY_ERRORS))
    async def put_item(id: ItemId, request: Request) -> schemas.Written:
        """Add an item, or replace it. The same request again changes nothing.

        The answer comes when the disk has the change. An item that is a file of the indexed folder gets the content of
        the file again with the next `proxymetric index`.
        """
        files, body = await read_body(request, schemas.PutBody)
        return await written(Write(puts=[await put_of(id, body, files)]))

    @app.patch("/items/{id:path}", openapi_extra=patch_body(), responses=errors(404, *BODY_ERRORS))
    async def patch_item(id: ItemId, request: Request) -> schemas.Written:
        """Change the class or columns of the metadata of an item; its image and vector stay."""
        files, body = await read_body(request, schemas.PatchBody)
        _check_no_files(files)
        return await written(Write(patches=[_patch(id, body)]))

    @app.delete("/items/{id:path}", responses=errors(403, 404, 422, 429, 503, 504, 507))
    async def delete_item(id: ItemId) -> schemas.Written:
        """Remove an item. An item that is not there is no error: a request may be repeated when its answer was lost.

        Its bytes are gone with the next merge of the log, or with `proxymetric index compact`.
        """
        return await written(Write(deleted=[id]))

    @app.post("/items", openapi_extra=bulk_body(), responses=errors(404, *BODY_ERRORS))
    async def post_items(request: Request) -> schemas.Written:
        """Add, replace, change and remove items in one step: all of it, or nothing if there is a mistake."""
        files, body = await read_body(request, schemas.BulkBody)
        _check_no_files(files)
        ids = [*(item.id for item in body.put), *(item.id for item in body.patch), *body.delete]
        if len(ids) > schemas.MOST_WRITTEN:
            raise Refused(422, f"body: got {len(ids):,} items, expected at most {schemas.MOST_WRITTEN:,}")
        if len(set(ids)) < len(ids):
            double = next(item for item in ids if ids.count(item) > 1)
            raise Refused(422, f"id: got {double[:200]!r} twice, expected each id once")
        making = [asyncio.ensure_future(named(item)) for item in body.put]
        try:
            puts = await asyncio.gather(*making)
        finally:
            for task in making:  # with a mistake in one of them, the others are not needed
                task.cancel()
        return await written(Write(puts, [_patch(item.id, item) for item in body.patch], body.delete))


def _patch(item: str, body: schemas.PatchBody) -> Patch:
    return Patch(item, (body.label,) if "label" in body.model_fields_set else (), body.metadata)


def _check(item: str, vector: torch.Tensor, dim: int, label: str | None, metadata: schemas.Metadata) -> None:
    """Refuse an item that no index can have."""
    try:
        new_items(dim, [item], vector, [label], [metadata], None)
    except ValueError as error:
        raise Refused(422, shortened(str(error), LONGEST_SENTENCE)) from None


def _check_no_files(files: Sequence[bytes]) -> None:
    if files:
        raise Refused(415, "content-type: got multipart/form-data with files, expected application/json")
