"""What the service takes and returns; its OpenAPI description is made from these."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MOST_QUERIES, MOST_CONDITIONS, MOST_OFFSET, MOST_WRITTEN = 8, 16, 10_000, 1_000
"""images or items of a search, its conditions, results that it leaves out, and items that one request changes"""
Metadata = dict[str, Any]


class Item(BaseModel):
    """An item of the index."""

    id: str
    label: str | None = Field(serialization_alias="class", description="Its class; null if it has none.")
    metadata: dict[str, Any]
    thumbnail: str = Field(description="Path of its thumbnail.")
    row: int = Field(description="Number of its point on the map, in this state of the index.")


class Hit(Item):
    """A result of a search."""

    rank: int
    similarity: float = Field(description="Cosine similarity with the query, from -1 to 1.")


class Results(BaseModel):
    """The results of a search, most similar first."""

    results: list[Hit]
    more: bool = Field(description="Whether there are further results: the next page has `offset` + `k`.")
    generation: int = Field(
        description="Number of the state of the index. Pages of the same state have each result once."
    )


class SearchBody(BaseModel):
    """A search: by one or several images, or by the ids of items, exactly one of the four."""

    model_config = ConfigDict(extra="forbid")
    image: str = Field(default="", description="The bytes of an image file in base64.")
    images: list[str] = Field(
        default=[],
        min_length=1,
        max_length=MOST_QUERIES,
        description="Several, in base64: the query is the mean of their vectors of unit length.",
    )
    id: str = Field(default="", description="The id of an item; it is left out of the results.")
    ids: list[str] = Field(
        default=[],
        min_length=1,
        max_length=MOST_QUERIES,
        description="The ids of several items, whose mean vector is the query; they are left out of the results.",
    )
    k: int = Field(default=12, ge=1, description="Number of results.")
    where: Any = Field(
        default=None,
        description="Only items that match: texts such as `price<50`, `brand=a,b` or `added>=2026-01-31`; or an "
        'object: column -> a value, a list of values of which one matches, or operator -> value such as {"<": 50}. The '
        "column `class` is the class.",
    )
    offset: int = Field(default=0, ge=0, le=MOST_OFFSET, description="Results that are left out first.")
    min_similarity: float | None = Field(default=None, ge=-1, le=1, description="Only items at least this similar.")
    one_per: str | None = Field(
        default=None, description="A column: of items with the same value, only the most similar one is a result."
    )


class IdentifyBody(BaseModel):
    """A question for the class of an image, or of an item of the index, exactly one of them."""

    model_config = ConfigDict(extra="forbid")
    image: str = Field(default="", description="The bytes of an image file in base64.")
    id: str = Field(default="", description="The id of an item; it is left out of its own class.")
    far: float = Field(
        default=0.01,
        ge=1e-6,
        le=0.5,
        description="False-accept rate: the share of images of other classes that are taken for one of these.",
    )


class Identified(BaseModel):
    """Which class of the index is on an image, or none of them."""

    label: str | None = Field(serialization_alias="class", description="The class; null: none of these.")
    score: float = Field(description="Similarity to the best class, less a part of that to the runner-up.")
    threshold: float = Field(description="Scores above it are accepted.")
    far: float
    best: str = Field(description="The best class, whether it is accepted or not.")
    similarity: float
    runner_up: str | None
    runner_up_similarity: float | None
    uncertainty: float | None = Field(description="Of the method about the best class; null: there is no estimate.")
    has_uncertainty: bool = Field(description="Whether the method estimates it for the classes that it was trained on.")
    generation: int = Field(description="Number of the state of the index.")


class MapInfo(BaseModel):
    """The map of the index; `/map/points` has its points."""

    method: str
    count: int
    classes: list[str] = Field(description="Names of the classes; a point of /map/points has a number into this list.")
    generation: int


class Proxy(BaseModel):
    """A proxy of the run that made the index, on the map."""

    label: str = Field(serialization_alias="class", description="The training class that it stands for.")
    x: float
    y: float
    radius: float = Field(description="One standard deviation of a Gaussian proxy, as a distance; 0 for a point.")


class MapProxies(BaseModel):
    """The proxies of the run that made the index, on the map."""

    proxies: list[Proxy]
    total: int = Field(description="How many the run has; of very many, only some are on the map.")
    generation: int


class Limits(BaseModel):
    """The limits of the service."""

    bytes: int
    pixels: int
    results: int


class Column(BaseModel):
    """A column of the metadata."""

    name: str
    kind: str = Field(description="What its values are: text, number, date, or words (each item may have several).")
    values: list[str] | None = Field(description="The different values of text and words; null if they are many.")
    least: float | str | None = Field(description="The smallest number, or the first date.")
    greatest: float | str | None = Field(description="The largest number, or the last date.")


class Info(BaseModel):
    """Facts about the index and the service."""

    count: int
    dim: int
    model: str = Field(description="Fingerprint of the model that made the vectors.")
    engine: str
    columns: list[Column]
    generation: int
    writable: bool = Field(description="Whether requests with the write token may change the index.")
    limits: Limits


class PutBody(BaseModel):
    """What an item is: an image or a vector, exactly one of them."""

    model_config = ConfigDict(extra="forbid")
    image: str = Field(default="", description="The bytes of an image file in base64.")
    vector: list[Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default=[], description="Its vector, of any length but zero; `model` says which model made it."
    )
    model: str = Field(default="", description="With `vector`: the fingerprint of its model, as in /info.")
    label: str | None = Field(default=None, alias="class", description="Its class; null: it has none.")
    metadata: Metadata = Field(
        default={}, description="Column -> text, a number, true, false, null or a list of words."
    )


class PatchBody(BaseModel):
    """What changes of an item that keeps its image and vector."""

    model_config = ConfigDict(extra="forbid")
    label: str | None = Field(default=None, alias="class", description="Its new class; null: none. Absent: as it was.")
    metadata: Metadata = Field(
        default={}, description="Columns that change, with their new values; null removes a value. Others stay."
    )


class PutItem(PutBody):
    """An item of several that are written."""

    id: str


class PatchItem(PatchBody):
    """An item of several that change."""

    id: str


class BulkBody(BaseModel):
    """Changes that are made in one step, or not at all; each id comes once."""

    model_config = ConfigDict(extra="forbid")
    put: list[PutItem] = Field(default=[], max_length=MOST_WRITTEN, description="Items that are added or replaced.")
    patch: list[PatchItem] = Field(default=[], max_length=MOST_WRITTEN, description="Items that change.")
    delete: list[str] = Field(default=[], max_length=MOST_WRITTEN, description="Ids of items that are removed.")


class Written(BaseModel):
    """What a change did; the disk has it."""

    added: int
    updated: int
    deleted: int
    unchanged: int = Field(description="Items that were as they should be, or were not there to be deleted.")
    generation: int = Field(description="Number of the state of the index that has the change.")


class Health(BaseModel):
    """Whether the service can answer."""

    status: str
    items: int
    stale: str | None = Field(
        default=None, description="Why the service answers from an earlier state of the index; absent if it does not."
    )


class ErrorContent(BaseModel):
    """What went wrong."""

    code: str = Field(description="For programs.")
    message: str = Field(description="A sentence for people.")


class Error(BaseModel):
    """An error."""

    error: ErrorContent
