"""Where a model lies: a run, a slim file, a shared folder, an address on the hub, or a backbone."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxymetric.system.files import read_json

SCHEME = "hf://"
BACKBONE = "backbone:"
"""what the place of a backbone begins with"""
CONFIG = "config.json"
"""the description of a shared model, by the name that the hub expects"""


@dataclass(frozen=True)
class Place:
    """A place on the disk or on the hub that holds a model; `place_of` says which kind it is.

    Args:
        text: the place as the user wrote it.
    """

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def path(self) -> Path:
        """The place as a path."""
        return Path(self.text)

    @property
    def absolute(self) -> str:
        """The place as it is written down: it means the same in another working directory."""
        return os.path.abspath(self.text)

    @property
    def next_to(self) -> Path:
        """The path that the names of output about the model begin with."""
        place = self.path.resolve() if self.path.name in ("", "..") else self.path
        return place.with_name(place.stem if place.is_file() else place.name)

    def exists(self) -> bool:
        """Return whether there is something at this place, as far as that is known without a connection."""
        return self.path.exists()


class RunFolder(Place):
    """The folder of a run; a place that holds nothing counts as one, and reading it says what is missing."""

    def is_finished(self) -> bool:
        """Return whether the training of the run has ended."""
        return (self.path / "result.json").is_file()


class SlimFile(Place):
    """A file that `export --slim` wrote, or any other file: loading it says what it is not."""


@dataclass(frozen=True)
class HubFolder(Place):
    """A folder that `export --hub` wrote.

    Args:
        text: the folder.
        config: the content of its `config.json`.
    """

    config: dict[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class HubAddress(Place):
    """An address on the Hugging Face hub.

    Args:
        text: "hf://owner/name", or "hf://owner/name@revision".
        repository: "owner/name".
        revision: a branch, a tag or a commit; None: the newest state.
    """

    repository: str
    revision: str | None

    @property
    def absolute(self) -> str:
        """The address."""
        return self.text

    @property
    def next_to(self) -> Path:
        """The name of the model, in the working directory."""
        return Path(self.repository.split("/")[1])

    def exists(self) -> bool:
        """Return True: only fetching it tells."""
        return True


@dataclass(frozen=True)
class Pretrained(Place):
    """A backbone with the weights of its pre-training: a model that was not trained here.

    Args:
        text: "backbone:NAME".
        name: the name of the backbone, such as a model of timm.
    """

    name: str

    @property
    def absolute(self) -> str:
        """The same text: it means the same everywhere."""
        return self.text

    @property
    def next_to(self) -> Path:
        """The name of the backbone, in the working directory."""
        return Path(self.name)

    def exists(self) -> bool:
        """Return True: only loading it tells."""
        return True


def place_of(place: str | Path | Place) -> RunFolder | SlimFile | HubFolder | HubAddress | Pretrained:
    """Parse a place that holds a model; nothing is loaded or fetched.

    Args:
        place: what the user wrote, or a place that is parsed already.

    Raises:
        ValueError: an address on the hub has another form.

    Example:
        >>> place_of("runs/birds")
        RunFolder(text='runs/birds')
        >>> place_of("hf://owner/birds@v1.0")
        HubAddress(text='hf://owner/birds@v1.0', repository='owner/birds', revision='v1.0')
        >>> place_of("backbone:resnet50").name
        'resnet50'
        >>> place_of("hf://birds")
        Traceback (most recent call last):
        ValueError: run: got 'hf://birds', expected 'hf://owner/name' or 'hf://owner/name@revision'
    """
    if isinstance(place, RunFolder | SlimFile | HubFolder | HubAddress | Pretrained):
        return place
    text = str(place)
    if text.startswith(SCHEME):
        form = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([^@\s]+))?", text)
        if form is None:
            raise ValueError(f"run: got {text!r}, expected 'hf://owner/name' or 'hf://owner/name@revision'")
        return HubAddress(text, form[1], form[2])
    if text.startswith(BACKBONE):
        name = text.removeprefix(BACKBONE)
        if not name:
            raise ValueError(f"run: got {text!r}, expected 'backbone:NAME', such as 'backbone:resnet50'")
        return Pretrained(text, name)
    path = Path(text)
    if path.is_file():
        return SlimFile(text)
    config = None if (path / "run.json").is_file() else hub_config(path)
    return RunFolder(text) if config is None else HubFolder(text, config)


def hub_config(folder: Path) -> dict[str, Any] | None:
    """Read the description of a shared model, of any version of the format; None if the folder holds none.

    Example:
        >>> import tempfile
        >>> hub_config(Path(tempfile.mkdtemp())) is None
        True
    """
    try:
        content = read_json(folder / CONFIG)
    except ValueError:
        return None
    is_config = isinstance(content, dict) and str(content.get("format", "")).startswith("proxymetric hub")
    return content if is_config else None
