"""A run's model as one file for use elsewhere: a torch.export program, ONNX, or only what was trained."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.core.pieces import NORMALISATIONS
from proxymetric.encoders import Encoder
from proxymetric.files import replacing
from proxymetric.models.load import load, read_run
from proxymetric.models.model import Model
from proxymetric.models.slim import write_slim

SUFFIXES = {"torch": ".pt2", "onnx": ".onnx", "slim": ".safetensors"}
INPUTS = {"uint8": "uint8 in 0..255", "float": "float32 in [0, 1]"}
"""the mark of a slim file, with the version of its layout"""
CLOSE = {"torch": 1e-6, "onnx": 1e-4}
"""how far a number of a vector may lie from the run's own: kernels and the order of sums differ"""


class Embedder(nn.Module):
    """Images (B, 3, S, S) -> vectors (B, dim), normalised as in training: what an exported program computes.

    >>> program = Embedder(build("small", dim=8, size=32).eval(), "l2")
    >>> program(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).norm(dim=1).round(decimals=4).tolist()
    [1.0, 1.0]
    """

    def __init__(self, encoder: Encoder, normalise: str) -> None:
        super().__init__()
        self.encoder = encoder
        self.normalise = normalise

    def forward(self, images: Tensor) -> Tensor:
        features = self.encoder.features(images, self._prompts(images.shape[0]))
        return NORMALISATIONS[self.normalise](self.encoder.head(features).float())

    def _prompts(self, batch: int) -> list[Tensor | None] | None:
        """The tuning's own prompts (B, n, D) by block; given from here the program stays free in B."""
        if not self.encoder.is_vit:
            return None
        found = [self.encoder.tuning.prompts(i) for i in range(len(self.encoder.backbone.blocks))]
        return [torch.cat(own).expand(batch, -1, -1) if own else None for own in found]


def export(
    run: str | Path,
    files: Mapping[str, str | Path],
    *,
    which: str = "best",
    takes: str = "uint8",
    overwrite: bool = False,
) -> dict[Path, str]:
    """Write a run's model to `files`; what each is, in words.

    Args:
        run: the folder that `train` wrote.
        files: what to write and where to: "torch" a .pt2, "onnx" a .onnx, "slim" a .safetensors.
        which: best, last or chosen, as for `load`.
        takes: the images of "torch" and "onnx": "uint8" in 0..255 or "float" in [0, 1]; a program takes one of them.
        overwrite: existing files are replaced.

    The programs hold the whole encoder, prompts included, and no proxies; they take any number of images of the
    encoder's size, and are compared with the model before they are put in place. A slim file holds what was trained:
    `load(file, weights=BACKBONE)` makes the model again.

    >>> export("runs/birds", {"slim": "birds.safetensors"})  # doctest: +SKIP
    {PosixPath('birds.safetensors'): 'what was trained of ...'}
    """
    if not files:
        raise ValueError("nothing to write: --torch FILE.pt2, --onnx FILE.onnx or --slim FILE.safetensors is expected")
    if takes not in INPUTS:
        raise ValueError(f"input: got {takes!r}, expected {' or '.join(INPUTS)}")
    targets = {kind: _target(kind, Path(file), overwrite) for kind, file in files.items()}
    if "onnx" in targets:
        _need("onnx", "onnxscript")
    about = read_run(run)
    model = load(run, which, "cpu")
    said: dict[Path, str] = {}
    if "slim" in targets:
        said[targets["slim"]] = write_slim(model, about["recipe"], targets["slim"])
    if "torch" in targets or "onnx" in targets:
        program = traced(model, takes)
        for kind, write in (("torch", _write_torch), ("onnx", _write_onnx)):
            if kind in targets:
                said[targets[kind]] = write(model, program, takes, targets[kind])
    return said


def traced(model: Model, takes: str = "uint8") -> torch.export.ExportedProgram:
    """The model as a program of torch.export, free in the number of images B."""
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        # A copy that nobody trains: vectors of the program are numbers, not the end of a graph.
        module = Embedder(copy.deepcopy(model.encoder).requires_grad_(False), model.normalise).eval()
        example = (_pixels(model.encoder.size, takes, 2),)
        return torch.export.export(module, example, dynamic_shapes={"images": {0: batch}}, strict=False)


def _write_torch(model: Model, program: torch.export.ExportedProgram, takes: str, out: Path) -> str:
    with replacing(out) as temporary:
        # As open files: by name, torch insists on the ending, which the temporary file does not have.
        with open(temporary, "wb") as file:
            torch.export.save(program, file, extra_files={"proxymetric.json": json.dumps(_facts(model, takes))})
        with open(temporary, "rb") as file:
            again = torch.export.load(file).module()
        _compare(model, again, takes, "torch", out)
    return f"a program for torch.export.load: {_shapes(model, takes)}; checked"


def _write_onnx(model: Model, program: torch.export.ExportedProgram, takes: str, out: Path) -> str:
    with _quiet():
        made = torch.onnx.export(program, (), output_names=["vectors"], dynamo=True, verbose=False)
    assert made is not None
    made.model.metadata_props["proxymetric"] = json.dumps(_facts(model, takes))
    can_check = importlib.util.find_spec("onnxruntime") is not None
    with replacing(out) as temporary:
        made.save(temporary, external_data=False)
        if can_check:
            import onnxruntime

            session = onnxruntime.InferenceSession(temporary.read_bytes(), providers=["CPUExecutionProvider"])
            entry = session.get_inputs()[0].name
            _compare(model, lambda x: torch.from_numpy(session.run(None, {entry: x.numpy()})[0]), takes, "onnx", out)
    checked = "checked with onnxruntime" if can_check else "not checked: onnxruntime is not installed"
    return f"an ONNX model: {_shapes(model, takes)}; {checked}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says of each operator that it leaves as it is: the program is compared anyway."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _compare(model: Model, program: Callable[[Tensor], Tensor], takes: str, kind: str, out: Path) -> None:
    """Refuse a program that gives other vectors than the model, for more images than it was traced with."""
    images = _pixels(model.encoder.size, takes, 3)
    with torch.no_grad():
        apart = (program(images) - model.embed(images)).abs().max().item()
    if not apart <= CLOSE[kind]:
        raise ValueError(f"{out} is not written: its vectors would differ from the model's by up to {apart:.3g}")


def _pixels(size: int, takes: str, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(0, 256, (number, 3, size, size), dtype=torch.uint8, generator=generator)
    return images if takes == "uint8" else images / 255


def _facts(model: Model, takes: str) -> dict[str, Any]:
    """What a user of the program must know of it."""
    return {
        "backbone": model.encoder.config["backbone"],
        "images": f"(B, 3, {model.encoder.size}, {model.encoder.size}), {INPUTS[takes]}",
        "dim": model.dim,
        "normalise": model.normalise,
        "view": vars(model.view),
        "classes": model.classes,
    }


def _shapes(model: Model, takes: str) -> str:
    size = model.encoder.size
    return f"images (B, 3, {size}, {size}), {INPUTS[takes]}, to vectors (B, {model.dim})"


def _target(kind: str, file: Path, overwrite: bool) -> Path:
    """Refuse a name that does not suit, a file that exists, and a run's own checkpoint."""
    if kind not in SUFFIXES:
        raise ValueError(f"files: got {kind!r}, expected {', '.join(SUFFIXES)}")
    if file.suffix != SUFFIXES[kind]:
        raise ValueError(f"--{kind}: got {file}, expected a name that ends in {SUFFIXES[kind]}")
    if file.is_dir():
        raise ValueError(f"--{kind}: {file} is a folder; the name of a file is expected")
    if file.name in ("best.safetensors", "last.safetensors") and (file.parent / "run.json").is_file():
        raise ValueError(f"--{kind}: {file} is the checkpoint of a run, which stays whole; another name is expected")
    if file.exists() and not overwrite:
        raise ValueError(f"--{kind}: {file} exists already; --overwrite replaces it")
    return file


def _need(*modules: str) -> None:
    lacking = [name for name in modules if importlib.util.find_spec(name) is None]
    if lacking:
        raise ValueError(f"--onnx needs {' and '.join(lacking)}; the extra has them: pip install 'proxymetric[export]'")
