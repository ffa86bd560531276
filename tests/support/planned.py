"""The measurements that plans are compared with: workloads on a GPU, with their memory and time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from proxymetric.runs.planning import Workload, machines

ROOT = Path(__file__).resolve().parent.parent.parent
H200 = machines()["NVIDIA H200"]
RECORD = json.loads((ROOT / "benchmarks" / "results" / "losses-cuda.json").read_text())
"""measurements on the H200"""


def recorded() -> list[tuple[Workload, dict[str, float]]]:
    """The measurements of triton on the H200: workloads, with their memory and time."""
    like = Workload(1, RECORD["dim"], 1, dtype=RECORD["type"], implementation="triton")
    found = [
        (replace(like, batch=int(batch.split()[1]), classes=int(classes.split()[0])), sides["triton"])
        for batch, sizes in RECORD["proxy-anchor"].items()
        for classes, sides in sizes.items()
    ]
    for method in ("soft-triple", "mpa-ap"):
        ten = replace(like, classes=100_000, per_class=10, method=method)
        for batch, sides in RECORD["ten per class"][method].items():
            found.append((replace(ten, batch=int(batch.split()[1])), sides["triton"]))
    return found
