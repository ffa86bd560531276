"""Write the model of a run: a torch.export program, an ONNX model, its trained parameters, or a folder to share."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import logging
import mmap
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.arguments.signatures import one_of
from proxymetric.core.normalisation import NORMALISATIONS
from proxymetric.encoders import Encoder
from proxymetric.models.hub import check_folder, write_hub
from proxymetric.models.load import load, read_run
from proxymetric.models.model import Model
from proxymetric.models.model_card import check_licence
from proxymetric.models.run_folder import model_folder
from proxymetric.models.slim import is_slim, write_slim
from proxymetric.system.files import check_output, read_json_object, replacing

SUFFIXES = {"torch": ".pt2", "onnx": ".onnx", "slim": ".safetensors", "hub": ""}
INPUTS = {"uint8": "uint8 in 0..255", "float": "float32 in [0, 1]"}
MAX_DIFFERENCE = {"torch": 1e-6, "onnx": 1e-4}
"""largest allowed difference between a program's vectors and the model's: kernels and the order of sums differ"""


class Embedder(nn.Module):
    """The module that is exported: it maps images (B, 3, S, S) to vectors (B, dim), normalised as in training.

    Args:
        encoder: the encoder.
        normalise: a key of `core.pieces.NORMALISATIONS`.

    Example:
        >>> from proxymetric.encoders import build
        >>> program = Embedder(build("small", dim=8, size=32).eval(), "l2")
        >>> program(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).norm(dim=1).round(decimals=4).tolist()
        [1.0, 1.0]
    """

    def __init__(self, encoder: Encoder, normalise: str) -> None:
        super().__init__()
        self.encoder = encoder
        self.normalise = normalise

    def forward(self, images: Tensor) -> Tensor:
        """Return the vectors (B, dim) of `images` (B, 3, S, S)."""
        features = self.encoder.features(images, self._prompts(images.shape[0]))
        return NORMALISATIONS[self.normalise](self.encoder.head(features).float())

    def _prompts(self, batch: int) -> list[Tensor | None] | None:
        """Return the tuning's prompts (B, n, D) by block; as an argument, they keep the batch size B dynamic."""
        if not self.encoder.is_vit:
            return None
        prompts = [self.encoder.tuning.prompts(i) for i in range(len(self.encoder.backbone.blocks))]
        return [torch.cat(tokens).expand(batch, -1, -1) if tokens else None for tokens in prompts]


def export(
    run: str | Path,
    files: Mapping[str, str | Path],
    *,
    which: str = "best",
    takes: str = "uint8",
    overwrite: bool = False,
    licence: str | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[Path, str]:
    """Write the model of a run to files.

    A program holds the whole encoder with its prompts and no proxies. It takes any number of images of the encoder's
    size, and is compared with the model before its file is put in place. A slim file holds the trained parameters;
    `load(file, weights=BACKBONE)` restores the model. A folder for the hub holds the whole encoder, its
    description and a card; `load(folder)` restores the model.

    Args:
        run: the folder of a run.
        files: the file to write for each kind: "torch" (.pt2), "onnx" (.onnx) or "slim" (.safetensors); for
            "hub", a folder.
        which: "best", "last" or "chosen", as for `load`.
        takes: the pixels that "torch" and "onnx" take: "uint8" in 0..255 or "float" in [0, 1].
        overwrite: replace files that an earlier export wrote; other files are never replaced.
        licence: of "hub": the hub's identifier of the model's licence; None: the card says that it is unknown.
        say: called with the name of each stage when it begins.

    Returns:
        A description of each file.

    Raises:
        ValueError: an argument is wrong, or a program's vectors differ from the model's.

    Example:
        >>> export("runs/birds", {"slim": "birds.safetensors"})  # doctest: +SKIP
        {PosixPath('birds.safetensors'): 'the trained parameters of ...'}
    """
    if not files:
        raise ValueError(
            "files: got none, expected --torch FILE.pt2, --onnx FILE.onnx, --slim FILE.safetensors or --hub FOLDER"
        )
    one_of("input", takes, INPUTS)
    targets = {kind: _target(kind, Path(file), overwrite) for kind, file in files.items()}
    check_licence(licence)
    if "onnx" in targets:
        _check_installed("onnx", "onnxscript")
    tell = say or (lambda stage: None)
    recipe = read_run(model_folder(run, which))["recipe"]
    tell(f"loading the model of {run}")
    model = load(run, which, "cpu")
    descriptions: dict[Path, str] = {}
    if "slim" in targets:
        descriptions[targets["slim"]] = write_slim(model, recipe, targets["slim"])
    if "hub" in targets:
        result = Path(run) / "result.json"
        facts = read_json_object(result) if result.is_file() else {}
        descriptions[targets["hub"]] = write_hub(model, recipe, facts, targets["hub"], licence)
    if "torch" in targets or "onnx" in targets:
        tell("tracing the model as a program")
        program = trace(model, takes)
        if "torch" in targets:
            tell(f"writing {targets['torch']}, and comparing it with the model")
            descriptions[targets["torch"]] = _write_torch(model, program, takes, targets["torch"])
        if "onnx" in targets:
            tell("converting the program to ONNX: the longest stage, 10 to 30 s of a core for a large network")
            descriptions[targets["onnx"]] = _write_onnx(model, program, takes, targets["onnx"], tell)
    return descriptions


def trace(model: Model, takes: str = "uint8") -> torch.export.ExportedProgram:
    """Trace the model as a torch.export program that takes any number of images."""
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        # The copy has no gradients, because the program must not record an autograd graph.
        module = Embedder(copy.deepcopy(model.encoder).requires_grad_(False), model.normalise).eval()
        example = (_pixels(model.encoder.size, takes, 2),)
        return torch.export.export(module, example, dynamic_shapes={"images": {0: batch}}, strict=False)


def _write_torch(model: Model, program: torch.export.ExportedProgram, takes: str, out: Path) -> str:
    with replacing(out) as temporary:
        # Pass open files: given a name, torch insists on an ending that the temporary file does not have.
        with open(temporary, "wb") as file:
            torch.export.save(program, file, extra_files={"proxymetric.json": json.dumps(_facts(model, takes))})
        with open(temporary, "rb") as file:
            reloaded = torch.export.load(file).module()
        _compare(model, reloaded, takes, "torch", out)
    return f"a program for torch.export.load: {_shapes(model, takes)}; checked"


def _write_onnx(
    model: Model, program: torch.export.ExportedProgram, takes: str, out: Path, tell: Callable[[str], None]
) -> str:
    with _quiet():
        exported = torch.onnx.export(program, (), output_names=["vectors"], dynamo=True, verbose=False)
    assert exported is not None
    exported.model.metadata_props["proxymetric"] = json.dumps(_facts(model, takes))
    can_check = importlib.util.find_spec("onnxruntime") is not None
    tell(f"writing {out}{', and comparing it with the model' if can_check else ''}")
    with replacing(out) as temporary:
        exported.save(temporary, external_data=False)
        if can_check:
            import onnxruntime

            session = onnxruntime.InferenceSession(temporary.read_bytes(), providers=["CPUExecutionProvider"])
            entry = session.get_inputs()[0].name
            _compare(model, lambda x: torch.from_numpy(session.run(None, {entry: x.numpy()})[0]), takes, "onnx", out)
    checked = "checked with onnxruntime" if can_check else "not checked: onnxruntime is not installed"
    return f"an ONNX model: {_shapes(model, takes)}; {checked}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's messages about individual operators; the program is compared with the model anyway."""
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
    """Refuse a program whose vectors differ from the model's; three images are compared, two were traced."""
    images = _pixels(model.encoder.size, takes, 3)
    with torch.no_grad():
        difference = (program(images) - model.embed(images)).abs().max().item()
    if not difference <= MAX_DIFFERENCE[kind]:
        raise ValueError(
            f"--{kind}: got a program whose vectors differ from the model's by up to {difference:.3g}, expected at "
            f"most {MAX_DIFFERENCE[kind]:g}; {out} is not written"
        )


def _pixels(size: int, takes: str, number: int) -> Tensor:
    """Return `number` random images."""
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(0, 256, (number, 3, size, size), dtype=torch.uint8, generator=generator)
    return images if takes == "uint8" else images / 255


def _facts(model: Model, takes: str) -> dict[str, Any]:
    """Return the facts that a user of the program needs; they are stored in its file."""
    return {
        "backbone": model.encoder.config["backbone"],
        "images": f"(B, 3, {model.encoder.size}, {model.encoder.size}), {INPUTS[takes]}",
        "dim": model.dim,
        "normalise": model.normalise,
        "view": vars(model.view),
        "classes": model.classes,
    }


def _shapes(model: Model, takes: str) -> str:
    """Describe the input and the output of a program."""
    size = model.encoder.size
    return f"images (B, 3, {size}, {size}), {INPUTS[takes]}, to vectors (B, {model.dim})"


def _target(kind: str, file: Path, overwrite: bool) -> Path:
    """Refuse a wrong ending, an existing file without `overwrite`, and in any case a file that no export wrote."""
    one_of("files", kind, SUFFIXES)
    if kind == "hub":
        return check_folder(file, overwrite)
    if file.suffix != SUFFIXES[kind]:
        raise ValueError(f"--{kind}: got {file}, expected a name that ends in {SUFFIXES[kind]}")
    if file.name in ("best.safetensors", "last.safetensors") and (file.parent / "run.json").is_file():
        raise ValueError(f"--{kind}: got {file}, which is the checkpoint of a run; expected another name")
    if file.is_file() and not overwrite:
        raise ValueError(f"--{kind}: got {file}, which exists; expected another name, or --overwrite")
    is_ours = {"torch": _is_torch_program, "onnx": _is_onnx_model, "slim": is_slim}[kind]
    return check_output(f"--{kind}", file, "a file that `proxymetric export` wrote", is_ours)


def _is_torch_program(file: Path) -> bool:
    """Whether `_write_torch` wrote a file."""
    try:
        with zipfile.ZipFile(file) as program:
            return any(name.endswith("extra/proxymetric.json") for name in program.namelist())
    except (zipfile.BadZipFile, OSError):
        return False


def _is_onnx_model(file: Path) -> bool:
    """Whether `_write_onnx` wrote a file: the metadata of the model then has the key "proxymetric"."""
    if not file.stat().st_size:
        return False
    with open(file, "rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return view.find(b"proxymetric") >= 0


def _check_installed(*modules: str) -> None:
    """Refuse --onnx if one of `modules` is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"--onnx: got an environment without {' and '.join(missing)}, expected pip install 'proxymetric[export]'"
        )
