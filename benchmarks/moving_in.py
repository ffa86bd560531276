"""Compares the scripts of the guides for users of pytorch-metric-learning and open-metric-learning, in one run.

    python benchmarks/moving_in.py                             Proxy-Anchor, against pytorch-metric-learning
    python benchmarks/moving_in.py --oml OML/bin/python        also ArcFace, against open-metric-learning

open-metric-learning needs NumPy below 2, so it runs with the Python of a virtual environment of its own. The scripts
are those of benchmarks/moving/: the same network, images, seeds and settings on both sides. They take turns, each round
in a new process with one thread. Recorded are the lines of code, the CPU time of a step, the peak memory of the process
(with its imports, and above what it held before training), the largest difference between the two curves of losses, the
scores on classes that were not trained, by the script's own library and by proxymetric, and the queries that have
another number of right images among their first five results. The differences are recorded in 32 bits and, from one
more round, in 64 bits, where rounding is too small to be seen. So is the load of the machine, before and after. The
result is written to results/moving-in-cpu.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, about, spread, write

from proxymetric import evaluate
from proxymetric.data import open_data

FOLDER = Path(__file__).resolve().parent / "moving"
PAIRS = {"pytorch-metric-learning": ("pml_theirs", "pml_ours"), "open-metric-learning": ("oml_theirs", "oml_ours")}


def lines_of(script: str) -> int:
    """The lines of code of a script: without its docstring, empty lines and comments.

    >>> lines_of("pml_ours") > 10
    True
    """
    text = (FOLDER / f"{script}.py").read_text()
    docstring = ast.parse(text).body[0]
    rest = text.splitlines()[docstring.end_lineno or 0 :]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in rest)


def write_images(file: Path, classes: int) -> None:
    """Write glyphs of 32 x 32 pixels: half of the classes to train on, half to measure with."""
    from proxymetric.data.views import EvalView

    images = open_data(f"glyphs:{classes}")
    view = EvalView(32, 32)
    pixels = torch.stack([view(images.read(row)) for row in range(len(images))]).float() / 255
    labels = torch.as_tensor(images.labels)
    trained = labels < classes // 2
    torch.save(
        {
            "images": pixels[trained],
            "labels": labels[trained],
            "test_images": pixels[~trained],
            "test_labels": labels[~trained],
        },
        file,
    )


def side(python: str, script: str, data: Path, epochs: int, double: bool = False) -> dict[str, Any]:
    """Run a script once in a new process, and measure its vectors by proxymetric too."""
    vectors = data.with_name("vectors.pt")
    options = ["--epochs", str(epochs), "--vectors", str(vectors), *(["--double"] if double else [])]
    command = [python, str(FOLDER / "worker.py"), script, str(data), *options]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{script}: {done.stderr[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    labels, found = torch.load(data)["test_labels"], torch.load(vectors)
    return result | {"by_proxymetric": evaluate(found, labels, list(result["scores"])), "vectors": found}


def differences(theirs: dict[str, Any], ours: dict[str, Any], labels: torch.Tensor) -> dict[str, Any]:
    """Compare the losses and the test vectors of both sides.

    Args:
        theirs: a run of one side.
        ours: a run of the other side.
        labels: the classes of the test images.

    Returns:
        The largest relative difference of the losses, and of how many queries the first five results differ in the
        number of right images.
    """
    losses = [abs(a - b) / abs(a) for a, b in zip(theirs["curve"], ours["curve"], strict=True)]
    right = []
    for run in (theirs, ours):
        unit = torch.nn.functional.normalize(run["vectors"].double())
        found = (unit @ unit.T).fill_diagonal_(-2).topk(min(5, len(labels) - 1)).indices
        right.append((labels[found] == labels[:, None]).sum(1))
    return {
        "losses": max(losses),
        "first 10 losses": max(losses[:10]),
        "queries": len(labels),
        "queries that differ": int((right[0] != right[1]).sum()),
    }


def version(python: str, package: str) -> str:
    """The version of a package in another environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def compare(
    theirs: list[dict[str, Any]], ours: list[dict[str, Any]], scripts: tuple[str, str], labels: torch.Tensor
) -> dict[str, Any]:
    """The record of a pair of scripts."""
    ratios = [own["ms"] / other["ms"] for own, other in zip(ours, theirs, strict=True)]
    return {
        "sides": {
            name: {
                "lines": lines_of(script),
                "ms": spread([run["ms"] for run in runs]),
                "process_mb": spread([run["process_mb"] for run in runs], 1),
                "training_mb": spread([run["process_mb"] - run["before_mb"] for run in runs], 1),
                "scores": runs[0]["scores"],
                "scores by proxymetric": runs[0]["by_proxymetric"],
                "first and last loss": [runs[0]["curve"][0], runs[0]["curve"][-1]],
                "torch": runs[0]["torch"],
            }
            for name, script, runs in zip(("theirs", "ours"), scripts, (theirs, ours), strict=True)
        },
        "steps": len(ours[0]["curve"]),
        "time of ours to theirs, by round": spread(ratios, 3),
        "in 32 bits": differences(theirs[0], ours[0], labels),
    }


def main() -> None:
    """Run the comparison and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oml", help="the Python of an environment with open-metric-learning")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS / "moving-in-cpu.json")
    arguments = parser.parse_args()
    pythons = {"pytorch-metric-learning": sys.executable}
    if arguments.oml:
        pythons["open-metric-learning"] = arguments.oml
    record = about("moving_in", "cpu", 1) | {"classes": arguments.classes, "epochs": arguments.epochs, "pairs": {}}
    record["load"] = {"before": os.getloadavg()}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "glyphs.pt"
        write_images(data, arguments.classes)
        for peer, python in pythons.items():
            theirs, ours = PAIRS[peer]
            runs: dict[str, list[dict[str, Any]]] = {theirs: [], ours: []}
            interpreters = {theirs: python, ours: sys.executable}
            for _ in range(arguments.rounds):
                for script, interpreter in interpreters.items():
                    runs[script].append(side(interpreter, script, data, arguments.epochs))
            labels = torch.load(data)["test_labels"]
            found = compare(runs[theirs], runs[ours], PAIRS[peer], labels)
            double = [side(p, script, data, arguments.epochs, True) for script, p in interpreters.items()]
            found["in 64 bits"] = differences(double[0], double[1], labels)
            record["pairs"][peer] = found | {"version": version(python, peer), "rounds": arguments.rounds}
            print(peer, json.dumps(record["pairs"][peer], indent=1))
    record["load"]["after"] = os.getloadavg()
    write(arguments.out, record)


if __name__ == "__main__":
    main()
