"""Transforms of your own: found by name or given from Python, exact when a run is resumed, refused in sentences."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from proxymetric.data import Batches, TrainFeed, TrainView, open_data
from proxymetric.data.own_transforms import apply_transform, find_transform, name_of
from proxymetric.runs.train import train
from proxymetric.system import _torchvision  # noqa: F401
from proxymetric.system.watcher import Silent
from terminal import proxymetric
from training_runs import TINY

MODULE = """
from torchvision.transforms import v2

def augment(size):
    return v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()])

def nothing(size):
    return None

def large(size):
    return v2.Compose([v2.Resize((size + 1, size + 1)), v2.ToImage()])

def broken(size):
    return size["side"]
"""


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    """A working directory with a module; each test has another module name, because modules stay imported."""
    name = f"views_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


def all_random(image: Image.Image) -> torch.Tensor:
    """A picture of the next random numbers of torch, NumPy and Python."""
    values = [float(torch.rand(())), float(np.random.rand()), random.random()]  # noqa: NPY002
    return torch.tensor(values).view(3, 1, 1).expand(3, 16, 16)


def test_the_random_numbers_of_a_view_come_from_its_seed_and_those_of_the_process_stay():
    image = Image.new("RGB", (20, 20))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second, third = (apply_transform(all_random, image, 16, seed) for seed in (5, 5, 6))
    assert torch.equal(first, second)
    assert (first != third).flatten(1).any(1).all()
    assert torch.equal(torch.get_rng_state(), before)


def test_feeds_of_any_number_of_workers_give_the_same_views(photos):
    images = open_data(photos)

    def epoch(start: int = 0, **settings) -> list[torch.Tensor]:
        feed = TrainFeed(images, Batches(images.labels, 8), TrainView(16, transform=all_random), seed=1, **settings)
        return [batch.images for batch in feed.epoch(1, start)]

    batches = epoch()
    assert len(torch.cat(batches)[:, :, 0, 0].unique(dim=0)) > len(images) - 8
    assert all(torch.equal(a, b) for a, b in zip(batches, epoch(workers=1), strict=True))
    assert torch.equal(epoch(start=2)[0], batches[2])
    assert torch.equal(epoch(cache="memory")[0], batches[0])
    with pytest.raises(ValueError, match="cache: got 'device' with a transform of your own"):
        epoch(cache="device")


@pytest.mark.slow
@pytest.mark.usefixtures("only_training")
def test_a_run_with_a_named_transform_continues_exactly(photos, working_folder, tmp_path):
    settings = TINY | {"view.transform": f"{working_folder}:augment", "train.epochs": 2}
    train(photos, out=tmp_path / "whole", settings=settings, watcher=Silent())
    train(photos, out=tmp_path / "parts", settings=settings | {"train.epochs": 1}, watcher=Silent())
    train(photos, out=tmp_path / "parts", settings=settings, resume=True, watcher=Silent())
    losses = [
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines() if '"loss"' in line]
        for name in ("whole", "parts")
    ]
    assert losses[0]
    assert [record["loss"] for record in losses[0]] == [record["loss"] for record in losses[1]]
    told = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert told["recipe"]["view"]["transform"] == f"{working_folder}:augment"


@pytest.mark.usefixtures("only_training")
def test_a_pipeline_from_python_is_part_of_the_run(photos, tmp_path):
    from torchvision.transforms import v2

    def pipeline(scale: float) -> v2.Compose:
        return v2.Compose([v2.RandomResizedCrop(16, scale=(scale, 1.0)), v2.ToImage(), v2.ToDtype(torch.float32, True)])

    settings = TINY | {"train.epochs": 1}
    train(photos, out=tmp_path / "run", transform=pipeline(0.5), settings=settings, watcher=Silent())
    name = json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]["view"]["transform"]
    assert name == name_of(pipeline(0.5)) != name_of(pipeline(0.4))
    more = {"settings": settings | {"train.epochs": 2}, "resume": True, "watcher": Silent()}
    with pytest.raises(ValueError, match=r"resume: got view\.transform='python:Compose-"):
        train(photos, out=tmp_path / "run", transform=pipeline(0.4), **more)
    train(photos, out=tmp_path / "run", transform=pipeline(0.5), **more)


def test_wrong_names_are_refused_with_the_nearest(working_folder):
    for name, message in (
        (f"{working_folder}:augmnt", "has no function 'augmnt'; did you mean 'augment'?"),
        (f"{working_folder}x:augment", f"there is no module '{working_folder}x' .*did you mean '{working_folder}'"),
        ("augment", "expected module:function"),
        (f"{working_folder}:nothing", "returns NoneType, expected a function that returns a transform"),
        (f"{working_folder}:broken", "failed with TypeError"),
        ("python:Compose-00000000", "given from Python; expected the same transform again"),
    ):
        with pytest.raises(ValueError, match=rf"view\.transform: got .*{message}"):
            find_transform(name, 16)


def test_the_command_line_refuses_before_it_opens_the_images(photos, working_folder):
    for word, message in (
        ("view.transform=no_such:thing", "there is no module 'no_such'"),
        (f"view.transform={working_folder}:large", "returned the shape (3, 17, 17), expected (3, 16, 16)"),
    ):
        words = [f"--set={key}={json.dumps(value)}" for key, value in TINY.items()]
        answer = proxymetric("train", "--data", photos, "--out", "run", *words, "--set", word, "--overwrite")
        assert answer.code == 1, answer
        assert message in " ".join(answer.err.split()), answer.err


def test_what_cannot_work_is_refused():
    from proxymetric.runs.recipe import check

    for settings, message in (
        ({"data": {"cache": "device"}}, "data.cache: got 'device' with view.transform='a:b'"),
        ({"train": {"frozen": True}}, "train.frozen: got true with view.transform='a:b'"),
    ):
        with pytest.raises(ValueError, match=message):
            check({"view": {"transform": "a:b"}, **settings})
    image = Image.new("RGB", (16, 16))
    for transform, message in (
        (lambda image: torch.full((3, 16, 16), -2.0), r"values in -2\.00\.\.-2\.00.*leave out the normalisation"),
        (lambda image: torch.zeros((3, 16, 16), dtype=torch.int64), "returned torch.int64"),
        (lambda image: "image", "returned str, expected a PIL image or a tensor"),
        (lambda image: torch.zeros((1, 16, 16)), r"returned the shape \(1, 16, 16\)"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_transform(transform, image, 16, 0)


@pytest.mark.slow
def test_a_module_may_import_torchvision_before_anything_else_has(working_folder):
    code = f"from proxymetric.data.own_transforms import find_transform; find_transform('{working_folder}:augment', 32)"
    subprocess.run([sys.executable, "-c", code], check=True)
