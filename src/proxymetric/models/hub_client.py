"""Fetch a shared model by its address `hf://owner/name`, with the Hugging Face hub's own client."""

from __future__ import annotations

import re
from pathlib import Path

SCHEME = "hf://"
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
"""the files of a shared model, by the names that the hub expects"""


def is_address(place: str | Path) -> bool:
    """Whether a place is an address on the hub.

    Example:
        >>> is_address("hf://owner/birds"), is_address("runs/birds")
        (True, False)
    """
    return isinstance(place, str) and place.startswith(SCHEME)


def parse(address: str) -> tuple[str, str | None]:
    """Split an address into the name of the repository and the revision.

    Raises:
        ValueError: the address has another form.

    Example:
        >>> parse("hf://owner/birds"), parse("hf://owner/birds@v1.0")
        (('owner/birds', None), ('owner/birds', 'v1.0'))
        >>> parse("hf://birds")
        Traceback (most recent call last):
        ValueError: run: got 'hf://birds', expected 'hf://owner/name' or 'hf://owner/name@revision'
    """
    form = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([^@\s]+))?", address)
    if form is None:
        raise ValueError(f"run: got {address!r}, expected 'hf://owner/name' or 'hf://owner/name@revision'")
    return form[1], form[2]


def fetch(address: str) -> Path:
    """Fetch the files of a shared model into the client's cache; files that are there are not fetched again.

    The client's own settings hold: HF_ENDPOINT (another server), HF_HOME (the cache), HF_TOKEN (private models) and
    HF_HUB_OFFLINE (the cache only).

    Args:
        address: "hf://owner/name", or "hf://owner/name@revision" with a branch, a tag or a commit.

    Returns:
        The folder in the cache.

    Raises:
        ValueError: the address is wrong, or the model is not there or cannot be fetched.
    """
    repository, revision = parse(address)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=[WEIGHTS, CONFIG]))
    except GatedRepoError:
        reason = "whose owner must grant access; expected a granted token in HF_TOKEN"
    except RepositoryNotFoundError:
        reason = "which the hub does not have, or which is private; expected another name, or a token in HF_TOKEN"
    except RevisionNotFoundError:
        reason = f"which has no revision {revision!r}; expected a branch, a tag or a commit"
    except HFValidationError as error:
        reason = f"which is no name of the hub ({error}); expected 'hf://owner/name'"
    except LocalEntryNotFoundError:
        reason = "which is not in the cache, and the hub cannot be reached; expected a connection, or a local folder"
    except OSError as error:
        reason = f"which could not be fetched ({str(error).splitlines()[0]}); expected a connection, or a local folder"
    raise ValueError(f"run: got {address!r}, {reason}")
