"""Compares the feed of a run with a DataLoader on the same JPEG files, and times what else a run does with images.

    python benchmarks/files.py                   some minutes
    python benchmarks/files.py --tiny            a few seconds, to try the benchmark

The benchmark draws JPEGs of 1,024 x 768 pixels. The other side is torch's DataLoader with torchvision's transforms
(RandomResizedCrop, RandomHorizontalFlip, PILToTensor), or the same written with Pillow where torchvision is missing:
the same number of workers, the same batches, uint8 tensors of 224 pixels. `none` reads the files in every epoch;
`memory` keeps decoded images whose shorter side is 256, on both sides. An epoch of each side in turn; times are
wall-clock times, and CPU times of all processes. `reduced` is the option `data.decode="reduced"`, which changes pixels.

Further: seconds until the first batch, evaluation crops, and three uses of a ResNet-18, each compared with a loop that
reads the same crops and calls the same network on batches of the same size: the features of a frozen network, `embed`,
and the embeddings of an evaluation. The time of features includes the hash of the weights, which names the cache, and
writing. The results are written to results/files-cpu.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import RESULTS, about, spread, write
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from proxymetric.data import ImageSet
from proxymetric.data.batches import Batches
from proxymetric.data.feeds import EvalFeed, TrainFeed
from proxymetric.data.views import EvalView, TrainView, shrink
from proxymetric.encoders import build
from proxymetric.features.cache import cached_features
from proxymetric.models.model import Model

TARGETS = {
    "images/s, feed to DataLoader": 1.0,
    "frozen features, embed and evaluation, images/s to bare loop": 1.0,
}
CPU_WORKERS = 1
"""threads that read ahead in a run without a GPU"""
SCALE, RATIO = (0.16, 1.0), (0.75, 1.3333)


class Setting(NamedTuple):
    """What all sides share."""

    images: int
    width: int
    height: int
    size: int
    batch: int
    rounds: int
    workers: tuple[int, ...]
    backbone: str


FULL = Setting(128, 1024, 768, 224, 32, 5, (0, 1, 2), "resnet18")
TINY = Setting(12, 96, 72, 32, 4, 2, (0, 1), "small")


def draw_files(setting: Setting, folder: Path) -> ImageSet:
    """Write JPEGs with large shapes and fine noise, about as large as photographs, and return the set."""
    random = np.random.default_rng(0)
    paths = []
    for k in range(setting.images):
        coarse = Image.fromarray(random.integers(256, size=(12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((setting.width, setting.height), Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = np.clip(smooth + random.normal(0, 8, size=smooth.shape), 0, 255).astype(np.uint8)
        paths.append(folder / f"{k:04}.jpg")
        Image.fromarray(noisy).save(paths[-1], quality=90)
    labels = np.arange(setting.images) % 4
    return ImageSet("drawn", labels, [f"class {c}" for c in range(4)], paths=paths, root=folder)


def peer_transform(size: int) -> tuple[Callable[[Image.Image], Tensor], str]:
    """Return the transforms of the other side, and the name of their library."""
    try:
        from torchvision import transforms

        import proxymetric.system._torchvision  # noqa: F401 - makes the import work where its compiled part is missing
    except (ImportError, RuntimeError):
        return lambda image: _own_transform(image, size), "Pillow"
    steps = [
        transforms.RandomResizedCrop(size, SCALE, RATIO),
        transforms.RandomHorizontalFlip(),
        transforms.PILToTensor(),
    ]
    return transforms.Compose(steps), "torchvision"


def _own_transform(image: Image.Image, size: int) -> Tensor:
    for _ in range(10):
        area = float(torch.empty(1).uniform_(*SCALE)) * image.width * image.height
        ratio = float(torch.exp(torch.empty(1).uniform_(*np.log(RATIO))))
        width, height = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if width <= image.width and height <= image.height:
            break
    else:
        width = height = min(image.size)
    left = int(torch.randint(image.width - width + 1, ()))
    top = int(torch.randint(image.height - height + 1, ()))
    cut = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)
    if float(torch.rand(())) < 0.5:
        cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(cut)).permute(2, 0, 1).contiguous()


class PeerFiles(Dataset):
    """The files, or the images in memory, with the transforms of the other side."""

    def __init__(self, images: ImageSet, size: int, in_memory: bool) -> None:
        assert images.paths is not None
        self.paths, self.labels = images.paths, images.labels
        self.transform, _ = peer_transform(size)
        stored = round(size * 256 / 224)
        self.kept = [shrink(self.load(k), stored) for k in range(len(images))] if in_memory else None

    def __len__(self) -> int:
        return len(self.paths)

    def load(self, k: int) -> Image.Image:
        with open(self.paths[k], "rb") as file:
            return Image.open(file).convert("RGB")

    def __getitem__(self, k: int) -> tuple[Tensor, int]:
        image = self.load(k) if self.kept is None else self.kept[k]
        return self.transform(image), int(self.labels[k])


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def spent(batches: Iterable[Any]) -> tuple[float, float, float]:
    """Return the seconds of an epoch, its CPU seconds, and the seconds until its first batch."""
    wall, cpu, first = time.perf_counter(), cpu_seconds(), 0.0
    for _ in batches:
        first = first or time.perf_counter() - wall
    return time.perf_counter() - wall, cpu_seconds() - cpu, first


def feeds(setting: Setting, images: ImageSet, cache: str, workers: int) -> dict[str, Callable[[int], Iterable[Any]]]:
    """Return the sides of a comparison: name -> a function of the epoch that returns its batches."""
    view = TrainView(setting.size, scale=SCALE, ratio=RATIO)
    batches = Batches(images.labels, setting.batch)
    ours = TrainFeed(images, batches, view, cache, workers=workers)
    reduced = TrainFeed(images, batches, view, cache, workers=workers, decode="reduced")
    files = PeerFiles(images, setting.size, cache == "memory")
    loader = DataLoader(files, setting.batch, shuffle=True, num_workers=workers, drop_last=True)
    sides: dict[str, Callable[[int], Iterable[Any]]] = {"feed": ours.epoch, "DataLoader": lambda epoch: loader}
    return sides | ({"reduced": reduced.epoch} if cache == "none" else {})


def compared(setting: Setting, images: ImageSet, cache: str, workers: int) -> dict[str, Any]:
    """Time the sides in turns."""
    begun = time.perf_counter()
    sides = feeds(setting, images, cache, workers)
    result: dict[str, Any] = {}
    for name, epoch in sides.items():
        result[name] = {"seconds to the first batch of a new feed": round(spent(epoch(0))[2], 3)}
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}
    for turn in range(setting.rounds):
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            times[name].append(spent(sides[name](turn + 1)))
    count = setting.images // setting.batch * setting.batch
    for name, found in times.items():
        result[name] |= {"images/s": spread([count / wall for wall, _, _ in found], 1)}
        result[name] |= {"CPU ms of an image": spread([1000 * cpu / count for _, cpu, _ in found], 3)}
        result[name] |= {"seconds to the first batch": spread([first for _, _, first in found], 3)}
    for name in sides.keys() - {"DataLoader"}:
        pairs = list(zip(times[name], times["DataLoader"], strict=True))
        result[f"images/s, {name} to DataLoader"] = spread([theirs[0] / mine[0] for mine, theirs in pairs])
        result[f"images per CPU second, {name} to DataLoader"] = spread([theirs[1] / mine[1] for mine, theirs in pairs])
    result["seconds"] = round(time.perf_counter() - begun, 1)
    return result


def networks(setting: Setting, images: ImageSet, folder: Path) -> dict[str, Any]:
    """Compare three uses of a network with a bare loop over the same crops; CPU times are those of all threads."""
    encoder = build(setting.backbone, size=setting.size, pretrained=False).eval()
    view = EvalView(setting.size)
    model = Model(encoder, normalise="l2", classes=[], view={"size": setting.size})
    assert images.paths is not None
    paths = list(images.paths)

    def frozen_features(turn: int) -> Tensor:
        return cached_features(
            encoder, images, view, folder=folder / str(turn), batch=setting.batch, workers=CPU_WORKERS
        ).vectors

    def embed(turn: int) -> Tensor:
        return model.embed(paths, batch=setting.batch)

    @torch.no_grad()
    def evaluate(turn: int) -> Tensor:
        feed = EvalFeed(images, view, setting.batch, workers=CPU_WORKERS)
        return torch.cat([encoder(encoder.place(batch.images)) for batch in feed])

    @torch.inference_mode()
    def bare(encode: Callable[[Tensor], Tensor]) -> Tensor:
        parts = []
        for rows in np.split(np.arange(len(images)), range(setting.batch, len(images), setting.batch)):
            crops = torch.stack([view(images.read(row)) for row in rows.tolist()])
            parts.append(encode(crops.contiguous(memory_format=torch.channels_last)))
        return torch.cat(parts)

    begun = time.process_time()
    encoder.fingerprint()
    result: dict[str, Any] = {"threads": torch.get_num_threads(), "batch": setting.batch}
    result["CPU seconds of the hash of the weights"] = round(time.process_time() - begun, 3)
    uses = {"frozen features": (frozen_features, encoder.features), "embed": (embed, encoder)}
    for name, (use, encode) in (uses | {"evaluation": (evaluate, encoder)}).items():
        result[name] = in_turns(setting, images, use, lambda turn, encode=encode: bare(encode))
        print(name, result[name], flush=True)
    return result


def in_turns(
    setting: Setting, images: ImageSet, use: Callable[[int], Tensor], bare: Callable[[int], Tensor]
) -> dict[str, Any]:
    """Time a use of the network and the bare loop in turns, each going first in every second turn."""
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "bare": []}
    sides = [("ours", use), ("bare", bare)]
    for turn in range(setting.rounds):
        for name, act in sides[:: 1 if turn % 2 == 0 else -1]:
            wall, cpu = time.perf_counter(), cpu_seconds()
            act(turn)
            times[name].append((time.perf_counter() - wall, cpu_seconds() - cpu))
    pairs = list(zip(times["ours"], times["bare"], strict=True))
    result: dict[str, Any] = {}
    for name, found in times.items():
        result[name] = {"images/s": spread([len(images) / wall for wall, _ in found], 1)}
        result[name]["CPU ms of an image"] = spread([1000 * cpu / len(images) for _, cpu in found], 3)
    result["images/s, ours to bare"] = spread([theirs[0] / mine[0] for mine, theirs in pairs])
    result["images per CPU second, ours to bare"] = spread([theirs[1] / mine[1] for mine, theirs in pairs])
    return result


def evaluation(setting: Setting, images: ImageSet) -> dict[str, Any]:
    """Time the crops of an evaluation, read from files and from the cache."""
    feed = EvalFeed(images, EvalView(setting.size), setting.batch, cache="memory")
    first, again = spent(feed), spent(feed)
    return {"images/s, first pass": round(len(images) / first[0], 1), "again": round(len(images) / again[0], 1)}


@contextlib.contextmanager
def drawn(setting: Setting) -> Iterator[tuple[ImageSet, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "files").mkdir()
        yield draw_files(setting, Path(folder) / "files"), Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few small files, to try the benchmark")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--workers", type=int, nargs="+", default=None, help="numbers of worker processes")
    parser.add_argument("--only-networks", action="store_true", help="only what needs a network; keeps other results")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    options = parser.parse_args()
    setting = TINY if options.tiny else FULL
    setting = setting._replace(rounds=options.rounds or setting.rounds, workers=options.workers or setting.workers)
    file = options.out or RESULTS / "files-cpu.json"
    record = about("files", "cpu") | {"targets": TARGETS, "setting": setting._asdict()}
    record["transforms"] = peer_transform(setting.size)[1]
    begun = time.perf_counter()
    with drawn(setting) as (images, folder):
        assert images.paths is not None
        record["KB of a file"] = round(sum(path.stat().st_size for path in images.paths) / len(images) / 1024, 1)
        if options.only_networks:
            earlier = json.loads(file.read_text()) if file.is_file() else {}
            measured = about("files", "cpu") | {"rounds": setting.rounds, "networks": networks(setting, images, folder)}
            earlier.pop("frozen", None)
            write(file, earlier | {"targets": TARGETS, "networks": measured})
            return
        for cache in ("none", "memory"):
            record[cache] = {}
            for workers in setting.workers:
                record[cache][f"{workers} workers"] = compared(setting, images, cache, workers)
                print(cache, workers, record[cache][f"{workers} workers"], flush=True)
                write(file, record)
        record["evaluation"] = evaluation(setting, images)
        print(record["evaluation"], flush=True)
        record["networks"] = networks(setting, images, folder)
    record["seconds"] = round(time.perf_counter() - begun, 1)
    write(file, record)
    print(f"written to {file}; {record['seconds']} s")


if __name__ == "__main__":
    main()
