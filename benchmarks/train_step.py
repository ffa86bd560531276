"""Compares the training loop of a run with a bare loop, and measures what the criterion costs in a step.

    python benchmarks/train_step.py                  a small network on the CPU, one thread; about a minute
    python benchmarks/train_step.py --device cuda    ResNet-50, 224 pixels, bfloat16, batch 128; about two minutes
    python benchmarks/train_step.py --data CUB_200_2011 --device cuda

The loop of a run is `Trainer` with `TrainFeed` and its device cache, as `proxymetric train` builds it. The bare loop is
made of the same network, precision and optimiser; its images lie on the device as a tensor of 256 x 256 pixels, it cuts
random parts by `grid_sample`, its Proxy-Anchor is written by hand, and it reads no figure. Without `--data`, the images
are random numbers with the sides of CUB's images in a cache (341 x 256). A round is an epoch of each side in turn,
without evaluations and checkpoints. Times are wall-clock times on a GPU, CPU times of the process on a CPU.

The criterion is then timed alone: call, backward pass to given embeddings, and commit, for every method that needs
nothing but embeddings and labels. The target of a share of a step is for the methods without a memory.
The results are written to results/train-step-cpu.json or results/train-step-cuda.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import RESULTS, about, clock_mhz, spread, synchronise, write
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from proxymetric.core.pieces import nothing
from proxymetric.criterion import Criterion
from proxymetric.data import ImageSet, split
from proxymetric.data.open import open_data
from proxymetric.papers import CATALOGUE, method
from proxymetric.runs.assemble import RunContext, make_encoder, make_learner, train_feed
from proxymetric.runs.recipe import Recipe, check
from proxymetric.system.watcher import Silent
from proxymetric.training.committed_state import committed_state
from proxymetric.training.process_group import ProcessGroup
from proxymetric.training.trainer import Trainer

TARGETS = {
    "images/s, trainer to bare": 0.97,
    "images/s, compiled trainer to bare": 1.0,
    "criterion without a memory, share of a step": 0.03,
}
STORED = (256, 341)
"""height and width of most of CUB's images when the shorter side is 256"""


class Setting(NamedTuple):
    """What all sides share."""

    backbone: str
    size: int
    batch: int
    dim: int
    classes: int
    images: int
    rounds: int
    pooling: str
    freeze_bn: bool
    criterion_steps: int


SETTINGS = {
    "cuda": Setting("resnet50", 224, 128, 512, 100, 3072, 5, "avg+max", True, 100),
    "cpu": Setting("small", 32, 128, 128, 100, 1280, 6, "auto", False, 30),
    "tiny": Setting("small", 16, 8, 16, 4, 32, 2, "auto", False, 2),
}


def synthetic(setting: Setting) -> ImageSet:
    """Return random images with the sides of CUB's images in a cache, reduced in proportion for smaller networks."""
    stored = round(setting.size * 256 / 224)
    height, width = stored, round(stored * STORED[1] / STORED[0])
    pixels = np.random.default_rng(0).integers(256, size=(setting.images, height, width, 3), dtype=np.uint8)
    labels = np.arange(setting.images) % setting.classes
    return ImageSet("synthetic", labels, [f"class {c}" for c in range(setting.classes)], arrays=pixels)


def recipe_of(setting: Setting, compiled: bool) -> Recipe:
    return check(
        {
            "method": "proxy-anchor",
            "view": {"size": setting.size},
            "data": {"cache": "device"},
            "encoder": {
                "backbone": setting.backbone,
                "dim": setting.dim,
                "pooling": setting.pooling,
                "freeze_bn": setting.freeze_bn,
                "pretrained": False,
            },
            "train": {
                "batch": setting.batch,
                "lr": 1e-4,
                "proxy_lr": 1e-2,
                "warmup": 0,
                "decay": "none",
                "epochs": 10_000,
                "evaluate_every": 10_000,
                "compile": compiled,
            },
        }
    )


class Trained:
    """The training loop of a run; a call trains an epoch and returns its seconds."""

    def __init__(self, setting: Setting, images: ImageSet, device: torch.device, folder: Path, compiled: bool) -> None:
        torch.manual_seed(0)
        recipe = recipe_of(setting, compiled)
        context = RunContext(recipe, device, ProcessGroup(), Silent(), {})
        encoder = make_encoder(recipe)
        feed = train_feed(context, encoder, images)
        learner = make_learner(context, encoder, np.bincount(images.labels).tolist())
        self.trainer = Trainer(learner, feed, recipe.train, folder, Silent(), device=device)
        self.trainer.save = lambda: None  # type: ignore[method-assign]  # checkpoints are not timed
        self.trainer.log.cut(0)
        self.device, self.steps = device, len(feed)

    def __call__(self) -> float:
        start = clock(self.device)
        self.trainer._train_epoch()
        assert self.trainer.skipped == 0
        return clock(self.device) - start


class Bare:
    """A loop of few lines; a call trains an epoch and returns its seconds."""

    def __init__(self, setting: Setting, images: ImageSet, device: torch.device, steps: int) -> None:
        torch.manual_seed(0)
        self.setting, self.device, self.steps = setting, device, steps
        recipe = recipe_of(setting, False)
        self.encoder = make_encoder(recipe).to(device)
        if device.type == "cuda":
            self.encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.proxies = nn.Parameter(torch.randn(len(images.classes), setting.dim, device=device))
        side = round(setting.size * 256 / 224)
        squares = [
            np.asarray(images.read(i).resize((side, side), Image.Resampling.BILINEAR)) for i in range(len(images))
        ]
        self.pixels = torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).contiguous().to(device)
        self.labels = torch.from_numpy(images.labels).to(device)
        groups = [{"params": self.encoder.parameters(), "lr": 1e-4}, {"params": [self.proxies], "lr": 1e-2}]
        fused = True if device.type == "cuda" else None
        self.optimizer = torch.optim.AdamW(groups, weight_decay=recipe.train.weight_decay, fused=fused)

    def views(self, rows: Tensor) -> Tensor:
        """Cut a random part of each image and mirror half of them: (B, 3, size, size) in [0, 1]."""
        count = len(rows)
        area, ratio, *place, flip = torch.rand(5, count, device=self.device)
        area, ratio = 0.16 + 0.84 * area, torch.exp(0.2877 * (2 * ratio - 1))
        width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
        theta = torch.zeros(count, 2, 3, device=self.device)
        theta[:, 0, 0], theta[:, 1, 1] = width * torch.where(flip < 0.5, -1.0, 1.0), height
        theta[:, 0, 2], theta[:, 1, 2] = (1 - width) * (2 * place[0] - 1), (1 - height) * (2 * place[1] - 1)
        size = self.setting.size
        grid = F.affine_grid(theta, [count, 3, size, size], align_corners=False)
        return F.grid_sample(self.pixels[rows].float() / 255, grid, align_corners=False)

    def loss(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Proxy-Anchor with margin 0.1 and scale 32."""
        cosines = F.normalize(embeddings.float()) @ F.normalize(self.proxies).T
        positive = F.one_hot(labels, len(self.proxies)).bool()
        exponents = torch.where(positive, -32 * (cosines - 0.1), 32 * (cosines + 0.1))
        pull = torch.where(positive, exponents.exp(), 0).sum(0).log1p().sum() / positive.any(0).sum()
        push = torch.where(positive, 0, exponents.exp()).sum(0).log1p().sum() / len(self.proxies)
        return pull + push

    def __call__(self) -> float:
        self.encoder.train()
        start = clock(self.device)
        order = torch.randperm(len(self.labels), device=self.device)
        for rows in order.split(self.setting.batch)[: self.steps]:
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                embeddings = self.encoder(self.views(rows))
            self.loss(embeddings, self.labels[rows]).backward()
            self.optimizer.step()
        return clock(self.device) - start


def clock(device: torch.device) -> float:
    """Return the seconds of a clock: CPU time, or on a GPU wall-clock time after synchronising."""
    synchronise(device.type)
    return time.perf_counter() if device.type == "cuda" else time.process_time()


def criterion_costs(setting: Setting, device: torch.device, step_ms: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure what a method costs: alone, and what it adds to a step of the network with the cheapest loss there is.

    Alone are the call, the backward pass to given embeddings, and the commit, one after the other: where launches are
    slow, this is the time of the host. What a step takes longer is measured by steps of the network with the method
    and with the mean square of the embeddings, in turns.
    """
    embeddings = torch.randn(setting.batch, setting.dim, device=device, requires_grad=True)
    labels = torch.arange(setting.batch, device=device) // 2 % setting.classes
    encoder = make_encoder(recipe_of(setting, False)).to(device).train()
    if device.type == "cuda":
        encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-5, fused=True if device.type == "cuda" else None)
    images = torch.rand(setting.batch, 3, setting.size, setting.size, device=device)

    def network_step(loss: Callable[[Tensor], Tensor], commit: Callable[[], None]) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = loss(encoder(images))
        value.backward()
        optimizer.step()
        commit()

    for name in CATALOGUE:
        torch.manual_seed(0)
        criterion = method(name, classes=setting.classes, dim=setting.dim, steps_per_epoch=10).to(device)
        if criterion.needs:
            continue
        state = committed_state(criterion, list(criterion.parameters()))
        keeps_memory = state is None or state.bytes > 0
        criterion.careful = False

        def commit(criterion: Criterion = criterion) -> None:
            criterion.commit(lr=1e-2, network_lr=1e-4)
            criterion.zero_grad(set_to_none=True)

        def alone(criterion: Criterion = criterion, commit: Callable[[], None] = commit) -> None:
            criterion(embeddings, labels).backward()
            commit()
            embeddings.grad = None

        each = rounds_ms(alone, device, setting.criterion_steps)
        found = {"ms alone": spread(each), "keeps a memory": keeps_memory}
        if keeps_memory:
            yield name, found
            continue
        with_method = partial(network_step, partial(_loss_of, criterion, labels), commit)
        without = partial(network_step, _mean_square, nothing)
        steps = max(1, setting.criterion_steps // 10)
        pairs = [
            (rounds_ms(with_method, device, steps, 1)[0], rounds_ms(without, device, steps, 1)[0]) for _ in range(5)
        ]
        shares = [(longer - shorter) / longer for longer, shorter in pairs]
        found |= {"share of a step": spread(shares), "share alone": round(statistics.median(each) / step_ms, 4)}
        yield name, found


def _loss_of(criterion: Criterion, labels: Tensor, embeddings: Tensor) -> Tensor:
    loss: Tensor = criterion(embeddings, labels)
    return loss


def _mean_square(embeddings: Tensor) -> Tensor:
    return embeddings.float().square().mean()


def rounds_ms(act: Callable[[], None], device: torch.device, steps: int, rounds: int = 5) -> list[float]:
    """Return the milliseconds of `act` in each round."""
    for _ in range(3):
        act()
    each = []
    for _ in range(rounds):
        start = clock(device)
        for _ in range(-(-steps // rounds)):
            act()
        each.append(1000 * (clock(device) - start) / -(-steps // rounds))
    return each


def compared(setting: Setting, images: ImageSet, device: torch.device, folder: Path, compiles: bool) -> dict[str, Any]:
    """Time the sides in turns."""
    names = ["trainer", "compiled trainer"] if compiles else ["trainer"]
    trained: dict[str, Trained] = {}
    first: dict[str, float] = {}
    for name in names:
        begun = time.perf_counter()
        (folder / name).mkdir()
        trained[name] = Trained(setting, images, device, folder / name, name != "trainer")
        trained[name]()  # fills the cache, loads kernels, compiles
        first[name] = round(time.perf_counter() - begun, 2)
    steps = trained["trainer"].steps
    sides: dict[str, Callable[[], float]] = {"bare": Bare(setting, images, device, steps), **trained}
    sides["bare"]()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    clocks = [clock_mhz()]
    for turn in range(setting.rounds):
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(sides[name]())
    clocks.append(clock_mhz())
    rate = {name: [steps * setting.batch / each for each in found] for name, found in seconds.items()}
    result: dict[str, Any] = {"steps": steps * setting.rounds, "rounds": setting.rounds, "clock_mhz": clocks}
    result["runs ahead"] = trained["trainer"].trainer.stepper.runs_ahead
    result["seconds of the first epoch, with set-up"] = first
    for name, found in seconds.items():
        result[name] = {"images/s": spread(rate[name], 1), "ms": spread([1000 * each / steps for each in found], 3)}
    for name in names:
        each = [mine / theirs for mine, theirs in zip(rate[name], rate["bare"], strict=True)]
        result[f"images/s, {name} to bare"] = spread(each)
    return result


def training_images(path: str) -> ImageSet:
    return split(open_data(path), 0.0, None, 0).train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--data", default=None, help="a data set to train on; default: random images")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled trainer")
    parser.add_argument("--no-criterion", action="store_true", help="leave out the times of the criterion alone")
    parser.add_argument("--only-criterion", action="store_true", help="add them to a file that has the rest")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the benchmark")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as in a run
    else:
        torch.set_num_threads(1)
    setting = SETTINGS["tiny" if options.tiny else options.device]
    setting = setting._replace(rounds=options.rounds or setting.rounds)
    file = options.out or RESULTS / f"train-step-{options.device}.json"
    head = about("train_step", options.device) | {"targets": TARGETS, "setting": setting._asdict()}
    begun = time.perf_counter()
    if options.only_criterion:
        record = json.loads(file.read_text()) | {"about the criterion": head}
    else:
        record = head | {"data": options.data or "random"}
        images = synthetic(setting) if options.data is None else training_images(options.data)
        with tempfile.TemporaryDirectory() as folder:
            compiles = device.type == "cuda" and not options.no_compile
            record["loop"] = compared(setting, images, device, Path(folder), compiles)
        print(record["loop"], flush=True)
        write(file, record)
    if not options.no_criterion:
        record["criterion"] = {}
        for name, found in criterion_costs(setting, device, record["loop"]["trainer"]["ms"]["median"]):
            record["criterion"][name] = found
            print(name, found, flush=True)
            write(file, record)
    record["seconds"] = round(time.perf_counter() - begun, 1)
    write(file, record)
    print(f"written to {file}; {record['seconds']} s")


if __name__ == "__main__":
    main()
