"""The batch sampler of your own loop, and the program of the page on several GPUs with two processes."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import proxymetric as pm
from proxymetric.data import Batches

LABELS = np.repeat(np.arange(12), [3, 9, 1, 5, 8, 2, 7, 7, 4, 6, 6, 6])
PAGE = Path(__file__).parent.parent.parent / "docs" / "tutorials" / "several-gpus.md"


@pytest.mark.parametrize("world", [1, 2])
def test_the_batches_are_those_of_the_trainer(world):
    for rank in range(world):
        theirs = Batches(LABELS, 12, 3, seed=5, rank=rank, world=world)
        sampler = pm.samplers.PerClass(LABELS.tolist(), 12, 3, seed=5, rank=rank, world=world)
        for epoch in (0, 3):
            sampler.set_epoch(epoch)
            assert [list(rows) for rows in theirs.epoch(epoch)] == list(sampler)
        sampler.set_epoch(3, start=2)
        assert len(sampler) == len(theirs) - 2
        assert list(sampler) == [list(rows) for rows in theirs.epoch(3, start=2)]


def test_a_loader_gives_classes_and_images():
    labels = torch.from_numpy(LABELS)
    sampler = pm.samplers.PerClass(labels, batch=12, per_class=3)
    batches = list(DataLoader(labels, batch_sampler=sampler, num_workers=0))
    assert len(batches) == len(sampler) == len(LABELS) // 12
    for batch in batches:
        assert batch.unique(return_counts=True)[1].tolist() == [3] * 4


def test_each_pass_is_the_next_epoch():
    """A loop that never calls `set_epoch` sees all images, and other batches in each pass."""
    labels = np.repeat(np.arange(20), 30)
    sampler = pm.samplers.PerClass(labels, batch=60, per_class=3)
    passes = [list(sampler) for _ in range(30)]
    assert passes[0] != passes[1]
    assert {row for batches in passes for rows in batches for row in rows} == set(range(600))
    sampler.set_epoch(1)
    assert list(sampler) == passes[1]
    assert list(sampler) == passes[2]
    sampler.set_epoch(5, start=4)
    assert len(sampler) == len(passes[5]) - 4
    assert list(sampler) == passes[5][4:]
    assert list(sampler) == passes[6], "the start is that of one pass"


def test_labels_may_be_text():
    names = [f"class {label:02}" for label in LABELS]
    assert list(pm.samplers.PerClass(names, 12, 3)) == list(pm.samplers.PerClass(LABELS, 12, 3))


def test_wrong_arguments_are_refused():
    sampler = pm.samplers.PerClass(LABELS, batch=12, per_class=3)
    for wrong, message in (
        (lambda: sampler.set_epoch(-1), "epoch: got -1, expected at least 0"),
        (lambda: sampler.set_epoch(0, start=99), "start: got 99, expected a step in 0.."),
        (lambda: pm.samplers.PerClass(LABELS, batch=13, per_class=3), "per_class: got 3, expected a divisor"),
        (lambda: pm.samplers.PerClass(LABELS, batch=39, per_class=3), "which needs 13 classes"),
        (lambda: pm.samplers.PerClass(LABELS, batch=12.0, per_class=3), "batch: got 12.0, expected a whole number"),
        (
            lambda: pm.samplers.PerClass(torch.rand(9), batch=4, per_class=2),
            "labels: got torch.float32, expected whole",
        ),
        (
            lambda: pm.samplers.PerClass(LABELS[None], batch=4, per_class=2),
            "labels: got shape .1, 64., expected one axis",
        ),
        (lambda: pm.gather_batch(torch.zeros(3, 2), torch.zeros(2)), "labels: got 2 labels, expected 3"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


@pytest.mark.release
def test_the_program_of_the_page_gives_the_same_weights_with_two_processes(tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    state = "{'net': net.weight, 'proxies': next(criterion.parameters()), 'loss': loss}"
    save = f"\nimport sys\ntorch.save({state}, sys.argv[1] + os.environ.get('RANK', 'one'))\n"
    program = tmp_path / "my_loop.py"
    program.write_text(code + save)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for words in ([sys.executable], launcher):
        done = subprocess.run(
            [*words, str(program), f"{tmp_path}/"], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
    one, first, second = (torch.load(tmp_path / name) for name in ("one", "0", "1"))
    torch.manual_seed(0)
    torch.randn(120, 64)
    start = torch.nn.Linear(64, 16).weight
    assert (one["net"] - start).abs().max() > 1e-3, "training moved the weights by more than the tolerance"
    for key, value in one.items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(second[key], value, rtol=1e-4, atol=1e-5)
