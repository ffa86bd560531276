"""Fetch a shared model by its address `hf://owner/name`, with the Hugging Face hub's own client."""

from __future__ import annotations

from pathlib import Path

from proxymetric.models.place import CONFIG, HubAddress, HubFolder, hub_config

WEIGHTS, CARD = "model.safetensors", "README.md"
"""the files of a shared model beside its description, by the names that the hub expects"""


def on_disk(place: HubFolder | HubAddress) -> HubFolder:
    """Return a shared model as a folder; one at an address is fetched.

    Raises:
        ValueError: it cannot be fetched, or there is another model at the address.
    """
    if isinstance(place, HubFolder):
        return place
    folder = fetch(place)
    if (config := hub_config(folder)) is None:
        raise ValueError(
            f"run: got {place}, which holds no model of this package; expected a folder that `export --hub` wrote"
        )
    return HubFolder(str(folder), config)


def fetch(address: HubAddress) -> Path:
    """Fetch the files of a shared model into the client's cache; files that are there are not fetched again.

    The client's own settings hold: HF_ENDPOINT (another server), HF_HOME (the cache), HF_TOKEN (private models) and
    HF_HUB_OFFLINE (the cache only).

    Args:
        address: the address.

    Returns:
        The folder in the cache.

    Raises:
        ValueError: the model is not there or cannot be fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(address.repository, revision=address.revision, allow_patterns=[WEIGHTS, CONFIG]))
    except GatedRepoError:
        reason = "whose owner must grant access; expected a granted token in HF_TOKEN"
    except RepositoryNotFoundError:
        reason = "which the hub does not have, or which is private; expected another name, or a token in HF_TOKEN"
    except RevisionNotFoundError:
        reason = f"which has no revision {address.revision!r}; expected a branch, a tag or a commit"
    except HFValidationError as error:
        reason = f"which is no name of the hub ({error}); expected 'hf://owner/name'"
    except LocalEntryNotFoundError:
        reason = "which is not in the cache, and the hub cannot be reached; expected a connection, or a local folder"
    except OSError as error:
        reason = f"which could not be fetched ({str(error).splitlines()[0]}); expected a connection, or a local folder"
    raise ValueError(f"run: got {address.text!r}, {reason}")
