"""Short runs of every method on glyphs, and what is stored of them; as a program, it rewrites `golden.json`.

Names and numbers must not change when files are moved or texts are edited. Only a change that is meant to alter
numbers may rewrite the file, and its message must say so.
"""

from __future__ import annotations

import json
import math
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from proxymetric.papers import CATALOGUE
from proxymetric.runs.train import train
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.watcher import Silent

FILE = Path(__file__).with_name("golden.json")
SETTINGS: dict[str, Any] = {
    "encoder.backbone": "small", "encoder.dim": 8, "view.size": 16, "view.resize": 16, "view.scale": [0.6, 1.0],
    "train.batch": 16, "train.epochs": 2, "train.lr": 1e-3, "train.warmup": 1, "train.metrics": ["R@1", "MAP@R"],
    "train.device": "cpu", "data.workers": 0, "data.test": "none", "data.validation": 0.34,
}  # fmt: skip
VIT = {
    "encoder.backbone": "test_vit", "encoder.pretrained": False, "encoder.tuning": "vpt+bitfit", "view.size": 32,
    "view.resize": 32,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in CATALOGUE},
    "proxy-anchor, rows": {"method": "proxy-anchor", "loss.touched": "batch"},
    "vptsp-m": {"method": "vptsp-m", **VIT},
    "vptsp-g": {"method": "vptsp-g", **VIT},
    "ccp on proxy-isa": {"method": "ccp", "loss.base": "proxy-isa"},
    "adapter": {"method": "proxy-anchor", **VIT, "encoder.tuning": "adapter"},
    "lora": {"method": "proxy-anchor", **VIT, "encoder.tuning": "lora"},
}


def ended(variant: str) -> dict[str, Any]:
    """The loss of each evaluation, and for every tensor of the checkpoint its shape, sum of sizes and first numbers."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        settings = SETTINGS | VARIANTS[variant]
        run = train("glyphs:6", out=Path(folder) / "run", settings=settings, watcher=Silent(), report=False)
        tensors = Checkpoint.read(run.folder / "last.safetensors").tensors
        curve = [{key: record[key] for key in ("loss", "MAP@R") if key in record} for record in run.result.curve]
    return {"curve": curve, "tensors": {n: _kept(v) for n, v in sorted(tensors.items()) if not n.startswith("random.")}}


def _kept(value: torch.Tensor) -> list[Any]:
    numbers = value.double().flatten()
    return [list(value.shape), float(f"{numbers.abs().sum():.9g}"), [float(f"{n:.9g}") for n in numbers[:3].tolist()]]


def machine() -> dict[str, str]:
    """Processor, its vector instructions and the version of torch, on which the rounding of the numbers depends."""
    vectors = torch.backends.cpu.get_cpu_capability()
    return {"processor": platform.machine(), "vectors": vectors, "torch": torch.__version__.split("+")[0]}


def stored() -> list[dict[str, Any]]:
    """The records of `golden.json`, one for each machine that wrote one: "machine" and "variants"."""
    return list(json.loads(FILE.read_text()))


def is_here(record: dict[str, Any]) -> bool:
    """Whether a record was written on a machine that rounds as this one does."""
    return record["machine"].items() <= machine().items()


def same(one: Any, other: Any) -> bool:
    """Whether two ends of a run are the same, up to the last digits."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other or math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-8))


def rewrite(here_only: bool) -> None:
    """Write the record of this machine; runs that end otherwise than before are dropped from those of other machines.

    A dropped run is compared with this machine's record there, in fewer digits, until the program runs there.

    Args:
        here_only: the change alters numbers on this machine only; nothing is dropped.
    """
    new = {"machine": machine(), "variants": {}}
    records = stored() if FILE.exists() else []
    before = next((record["variants"] for record in records if is_here(record)), {})
    for name in VARIANTS:
        print(name, file=sys.stderr)
        new["variants"][name] = ended(name)
        if name in before and not here_only and not same(new["variants"][name], before[name]):
            for record in records:
                record["variants"].pop(name, None)
    others = [record for record in records if not is_here(record) and record["variants"]]
    FILE.write_text("[" + ",\n".join(json.dumps(record, separators=(",", ":")) for record in [new, *others]) + "]\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    rewrite(here_only="--here-only" in sys.argv)
