"""Runs one script of this folder and prints what it cost; `moving_in.py` starts it, with the script's own Python.

python benchmarks/moving/worker.py pml_theirs DATA.pt --epochs 2
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import sys
import time
from pathlib import Path

import torch


def network() -> torch.nn.Module:
    """A small convolutional network for 32 x 32 images, the same on all sides."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(1024, 128))


def resident_mb() -> float:
    """The memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def run(script: str, data: dict[str, torch.Tensor], epochs: int, vectors: Path | None = None) -> dict[str, object]:
    """Train and measure with a script: the losses, the scores, the CPU time of a step and the memory.

    Args:
        script: name of a file of this folder.
        data: the images and labels.
        epochs: passes over the training images.
        vectors: file for the vectors of the test images.
    """
    module = importlib.import_module(script)
    classes = int(data["labels"].max()) + 1
    module.train(network(), data["images"], data["labels"], classes, 1)  # warm-up
    net, before = network(), resident_mb()
    torch.manual_seed(1)
    start = time.process_time()
    curve = module.train(net, data["images"], data["labels"], classes, epochs)
    seconds = (time.process_time() - start) / len(curve)
    scores = module.measure(net, data["test_images"], data["test_labels"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if vectors is not None:
        with torch.no_grad():
            torch.save(net(data["test_images"]), vectors)
    return {
        "curve": curve,
        "scores": {name: float(score) for name, score in scores.items()},
        "ms": 1000 * seconds,
        "process_mb": peak,
        "before_mb": before,
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script")
    parser.add_argument("data")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--vectors", type=Path)
    parser.add_argument("--double", action="store_true", help="compute in 64 bits")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    content = torch.load(arguments.data)
    if arguments.double:
        torch.set_default_dtype(torch.float64)
        torch.FloatTensor = torch.DoubleTensor  # the proxies of open-metric-learning are one
        content = {name: part.double() if part.is_floating_point() else part for name, part in content.items()}
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    print(json.dumps(run(arguments.script, content, arguments.epochs, arguments.vectors)))
