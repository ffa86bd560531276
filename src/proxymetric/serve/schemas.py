"""What the service takes and returns; its OpenAPI description is made from these."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


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
    generation: int = Field(description="Number of the state of the index.")


class SearchBody(BaseModel):
    """A search: by an image or by the id of an item, exactly one of them."""

    model_config = ConfigDict(extra="forbid")
    image: str = Field(default="", description="The bytes of an image file in base64.")
    id: str = Field(default="", description="The id of an item; it is left out of the results.")
    k: int = Field(default=12, ge=1, description="Number of results.")
    where: dict[str, str] = Field(
        default_factory=dict, max_length=8, description="Only items with these values: `class`, or metadata columns."
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


class Info(BaseModel):
    """Facts about the index and the service."""

    count: int
    dim: int
    engine: str
    columns: list[str]
    generation: int
    limits: Limits


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
