"""What a run knows about classes, as far as an index needs it to say "none of these"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.system.files import read_json, replacing
from proxymetric.system.tensor_files import read_tensors, write_tensors

HELD_OUT = "held_out.safetensors"
"""the file of a run with the vectors of its held-out classes; `train` writes it, or `evaluate`"""


class RunKnowledge(NamedTuple):
    """Facts about the classes of a run; empty where they are not known.

    Attributes:
        trained: names of the training classes.
        vectors: (N, D) of images of classes that were not trained on.
        labels: N names of their classes.
        uncertainty: training class -> how uncertain the method is of it; empty for methods without an estimate.
    """

    trained: list[str]
    vectors: Tensor
    labels: list[str]
    uncertainty: dict[str, float]


def run_knowledge(run: str | Path | None) -> RunKnowledge:
    """Read what a run knows about classes; a run that is missing, older or damaged knows less.

    Example:
        >>> run_knowledge(None).trained
        []
    """
    nothing = RunKnowledge([], torch.empty(0, 0), [], {})
    if run is None or not Path(run).is_dir():
        return nothing
    folder = Path(run)
    try:
        tensors, header = read_tensors(folder / HELD_OUT)
        classes = json.loads(header["classes"])
        labels = [str(classes[code]) for code in tensors["labels"].tolist()]
        trained, uncertainty = json.loads(header["trained"]), json.loads(header["uncertainty"])
        return RunKnowledge(trained, tensors["vectors"].float(), labels, uncertainty)
    except (OSError, ValueError, KeyError, IndexError):
        pass
    for part in (folder / "simpler" / "refit", folder / "simpler", folder / "refit", folder):
        try:
            return nothing._replace(trained=[str(name) for name in read_json(part / "run.json")["classes"]])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return nothing


def knowledge_stamp(run: str | Path | None) -> list[int] | None:
    """Size and time of what a run knows about classes, so that a change is noticed; None if it is not there.

    Example:
        >>> knowledge_stamp(None) is None
        True
    """
    if run is None:
        return None
    try:
        stat = (Path(run) / HELD_OUT).stat()
    except OSError:
        return None
    return [stat.st_size, stat.st_mtime_ns]


def copy_knowledge(source: Path, folder: Path) -> None:
    """Give the folder of a run what its simpler model knows about classes; nothing, if that knows nothing."""
    if not (source / HELD_OUT).is_file():
        (folder / HELD_OUT).unlink(missing_ok=True)
        return
    with replacing(folder / HELD_OUT) as temporary:
        temporary.write_bytes((source / HELD_OUT).read_bytes())


def write_knowledge(folder: Path, knowledge: RunKnowledge) -> None:
    """Write what a run knows about classes into its folder, atomically."""
    classes = sorted(set(knowledge.labels))
    code = {name: number for number, name in enumerate(classes)}
    tensors = {
        "vectors": knowledge.vectors.detach().cpu().float().contiguous(),
        "labels": torch.tensor([code[label] for label in knowledge.labels], dtype=torch.long),
    }
    facts = {"classes": classes, "trained": knowledge.trained, "uncertainty": knowledge.uncertainty}
    with replacing(folder / HELD_OUT) as temporary:
        write_tensors(temporary, tensors, {name: json.dumps(fact) for name, fact in facts.items()})
