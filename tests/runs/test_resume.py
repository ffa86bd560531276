"""A run of any method, stopped anywhere and resumed, continues bit for bit; a folder of another run is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from no_forms import no_forms
from proxymetric.core.pieces import Compare, Context, Energy, Objective, References
from proxymetric.papers import CATALOGUE
from proxymetric.papers.about import about
from proxymetric.sources import LearnedProxies
from proxymetric.system.checkpoint import Checkpoint, load_optimizer, module_tensors, optimizer_tensors
from proxymetric.system.files import read_json, write_json
from proxymetric.training.log import Log
from training_runs import Notes, Snapshot, Stop, StopAfter, records, run, same_run, same_tensors, state

pytestmark = pytest.mark.usefixtures("only_training")
CHOICES = {name: {"method": name} for name in CATALOGUE}
CHOICES |= {f"{name} (rows)": {"method": name, "loss__touched": "batch"} for name in ("proxy-anchor", "mpa-ap")}
CHOICES |= {"mpa-ap (nested)": {"method": "mpa-ap", "loss__nested": [2, 5, 8]}}
PROMPTED = {"encoder__backbone": "test_vit", "encoder__pretrained": False, "encoder__tuning": "vpt+bitfit"}
CHOICES |= {name: CHOICES[name] | PROMPTED | {"view__size": 32, "view__resize": 32} for name in ("vptsp-m", "vptsp-g")}
CHOICES["frozen statistics, plateau"] = {
    "method": "proxy-anchor", "encoder__freeze_bn": "statistics", "train__decay": "plateau", "train__decay_every": 1,
}  # fmt: skip
SHORT = {"train__epochs": 2, "train__warmup": 1}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six classes, four of which are trained on, in three steps per epoch."""
    from conftest import write_photos

    return write_photos(tmp_path_factory.mktemp("few") / "photos", classes=6, images=6)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_method_goes_on_bit_for_bit(choice: str, few: Path, tmp_path: Path) -> None:
    settings = SHORT | CHOICES[choice] | {"train__save_every": 2}
    out, straight = tmp_path / "run", tmp_path / "straight"
    # In the second epoch, after a step that changed everything and is not saved yet.
    run(few, straight, watcher=Snapshot(5, straight, out), **settings)
    assert (state(out)["step"], state(straight)["step"]) == (4, 6)
    run(few, out, resume=True, **settings)
    same_run(out, straight)


COUNTS = {
    "mpa": ("proxies in use", "criterion.objective.use", {"loss__per_class": 3}),
    "proxy-isa": (
        "informative share", "criterion.objective.weighting.tally",
        {"loss__memory_epoch": 0, "loss__filter_epoch": 0},
    ),
    "vptsp-g": ("semantic accuracy", "criterion.objective.source.tally", {}),
}  # fmt: skip
"""a method's figure, where a checkpoint holds its counts, and arguments"""


@pytest.mark.parametrize("choice", COUNTS)
def test_figures_count_the_steps_before_and_after_a_kill(choice: str, few: Path, tmp_path: Path) -> None:
    figure, counts, arguments = COUNTS[choice]
    settings = SHORT | CHOICES[choice] | arguments | {"train__save_every": 2}
    out, straight = tmp_path / "run", tmp_path / "straight"
    run(few, straight, watcher=Snapshot(5, straight, out), **settings)
    evaluated, saved = records(out)[-1]["step"], Checkpoint.read(out / "last.safetensors")
    assert (evaluated, saved.state["step"]) == (3, 4)
    assert saved.tensors[f"{counts}.closed"] == 0, "one step of the second epoch is counted in it"
    run(few, out, resume=True, **settings)
    ours, theirs = ([r.get("figures", {}) for r in records(f) if r["event"] == "evaluation"] for f in (out, straight))
    assert ours == theirs
    assert [figure in figures for figures in ours] == [False, True, True], "before training there is nothing to count"
    ended = Checkpoint.read(out / "last.safetensors").tensors
    assert ended[f"{counts}.closed"] == 1
    assert choice == "mpa" or ended[f"{counts}.sums"][0] == 24, "three steps of eight, that before the kill too"


class Noisy(LearnedProxies):
    """Proxies that come with noise, like those of a variational method."""

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, object]:
        refs, commit = super().forward(ctx, energy)
        return refs._replace(rows=refs.rows + 0.1 * torch.randn_like(refs.rows)), commit


@about(paper="none", choose="never")
def noisy(classes: int, dim: int) -> Objective:
    from proxymetric.losses import ProxyAnchor

    return Compare(ProxyAnchor(), Noisy(classes, dim))


def test_random_numbers_go_on_where_they_were(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "noisy", noisy)
    settings = SHORT | {"method": "noisy", "train__save_every": 2}
    out, straight = tmp_path / "run", tmp_path / "straight"
    run(few, straight, watcher=Snapshot(5, straight, out), **settings)
    torch.manual_seed(99)
    run(few, out, resume=True, **settings)
    same_run(out, straight)
    other = run(few, tmp_path / "other", seed=1, **settings)
    assert other.result.curve != json.loads((tmp_path / "run" / "result.json").read_text())["curve"]


@pytest.fixture(scope="module")
def stopped(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after four of six steps were saved."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxymetric.runs.session.closed_form_rows", no_forms)
        with pytest.raises(Stop):
            run(few, out, watcher=StopAfter(5), train__save_every=2, **SHORT)
    return out


@pytest.fixture
def again(stopped: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the stopped run, to be resumed."""
    return shutil.copytree(stopped, tmp_path / "run")


def test_the_log_is_cut_back_to_the_checkpoint(again: Path, few: Path, tmp_path: Path) -> None:
    log = again / "log.jsonl"
    before = log.read_bytes()
    with open(log, "ab") as out:
        out.write(b'{"event": "step", "step": 5}\n{"event": "eval')
    # A reader of the log gets complete records, also while the run continues or after it was killed.
    assert Log(log).records()[-1] == {"event": "step", "step": 5}
    run(few, again, resume=True, **SHORT)
    assert log.read_bytes().startswith(before)
    same_run(again, run(few, tmp_path / "straight", **SHORT).folder)


def test_a_log_that_lost_its_end_is_not_filled_with_zeros(again: Path, few: Path) -> None:
    log = again / "log.jsonl"
    log.write_bytes(b"")
    run(few, again, resume=True, **SHORT)
    assert [r["epoch"] for r in records(again) if r["event"] == "evaluation"] == [2]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"train__batch": 4}, r"got train.batch=4, expected 8, the value that .* began with"),
        ({"data__cache": "device"}, r"got data.cache='device', expected '\w+', the value that .* began with"),
        ({"seed": 3}, r"got seed=3, expected 0, the value"),
        ({"loss__margin": 0.3}, r"got loss.margin=0.3, expected 0.1, the value"),
        ({"method": "triplet"}, r"began with"),
    ],
)
def test_another_run_is_refused(settings: dict, sentence: str, again: Path, few: Path) -> None:
    before = (again / "last.safetensors").read_bytes()
    with pytest.raises(ValueError, match=sentence):
        run(few, again, resume=True, **SHORT | settings)
    assert (again / "last.safetensors").read_bytes() == before


def test_a_key_that_there_was_not_yet_had_its_default(again: Path, few: Path) -> None:
    begun = read_json(again / "run.json")
    del begun["recipe"]["train"]["evaluate_amp"], begun["recipe"]["encoder"]["tuning"]
    write_json(again / "run.json", begun)
    with pytest.raises(ValueError, match=r"got train.evaluate_amp=True, expected False, the value"):
        run(few, again, resume=True, **SHORT | {"train__evaluate_amp": True})
    run(few, again, resume=True, **SHORT)


def as_of_0_1_0(folder: Path, without: tuple[str, ...] = ()) -> None:
    """Remove the recipe keys, state and tensors that version 0.1.0 did not write."""
    begun = read_json(folder / "run.json")
    del begun["recipe"]["protocol"], begun["recipe"]["encoder"]["stride"]
    del begun["recipe"]["data"]["fraction"], begun["recipe"]["data"]["wrong_labels"]
    write_json(folder / "run.json", begun)
    last = Checkpoint.read(folder / "last.safetensors")
    del last.state["images"]
    last.tensors = {name: value for name, value in last.tensors.items() if not any(part in name for part in without)}
    last.write(folder / "last.safetensors")


def test_a_checkpoint_of_0_1_0_resumes(few: Path, tmp_path: Path) -> None:
    longer = SHORT | {"train__epochs": 3}
    run(few, tmp_path / "run", **SHORT)
    as_of_0_1_0(tmp_path / "run")
    again = run(few, tmp_path / "run", resume=True, **longer)
    same_tensors(
        again.folder / "last.safetensors", run(few, tmp_path / "straight", **longer).folder / "last.safetensors"
    )


def test_a_checkpoint_of_0_1_0_without_the_counts_of_proxy_isa_is_refused_in_a_sentence(few: Path, tmp_path: Path):
    settings = SHORT | {"method": "proxy-isa"}
    first = run(few, tmp_path / "run", **settings)
    as_of_0_1_0(tmp_path / "run", without=(".weighting.tally.",))
    with pytest.raises(ValueError, match=r"^resume: .*last\.safetensors does not fit this recipe's method: .*tally"):
        run(few, tmp_path / "run", resume=True, **settings | {"train__epochs": 3})
    assert first.load().dim == 8, "the model can still be used"


def test_other_images_are_refused(stopped: Path, few: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(few, tmp_path / "photos")
    Image.new("RGB", (16, 16)).save(moved / "class0" / "new.png")
    with pytest.raises(ValueError, match=r"not those that .* began with"):
        run(few, stopped, resume=True, data__path=str(moved), **SHORT)


def test_a_run_is_not_overwritten_by_mistake(again: Path, few: Path) -> None:
    with pytest.raises(ValueError, match="expected --resume to continue it, --overwrite to replace it"):
        run(few, again, **SHORT)


def test_more_epochs_may_be_asked_for(again: Path, few: Path, tmp_path: Path) -> None:
    notes = Notes()
    longer = SHORT | {"train__epochs": 4, "train__decay": "none"}
    with pytest.raises(ValueError, match=r"train\.decay"):
        run(few, again, resume=True, **longer)
    run(few, again, resume=True, watcher=notes, **SHORT | {"train__epochs": 4})
    assert "continuing from epoch 1, step 4" in notes.said
    same_run(again, run(few, tmp_path / "straight", **SHORT | {"train__epochs": 4}).folder)


def test_finished_is_finished(few: Path, tmp_path: Path) -> None:
    longer = SHORT | {"train__epochs": 4}  # fewer epochs do not help, and then there is nothing to refit
    first = run(few, tmp_path / "run", **longer)
    written = (first.folder / "last.safetensors").stat().st_mtime_ns
    second = run(few, tmp_path / "run", resume=True, **longer)
    assert (first.folder / "last.safetensors").stat().st_mtime_ns == written
    assert second.result == first.result, "also what it cost, and when"
    old = {"seconds": 1e6, "memory": {"process_mb": 1e6}}
    write_json(first.folder / "result.json", first.result.as_dict() | old)
    assert run(few, tmp_path / "run", resume=True, **longer).result.as_dict() == first.result.as_dict() | old
    refitted = longer | {"train__refit": True}
    third = run(few, tmp_path / "run", resume=True, **refitted)
    assert third.result.seconds < 1e6, "then there was work to do"
    assert third.result.memory == old["memory"], "but not here"
    assert run(few, tmp_path / "run", resume=True, **refitted).result == third.result
    # A result.json of another number of steps is ignored: its cost is not taken over.
    write_json(first.folder / "result.json", first.result.as_dict() | old | {"steps": 3})
    changed = run(few, tmp_path / "run", resume=True, **longer).result
    assert changed.seconds < 1e6
    assert changed.memory != old["memory"]


def test_a_bad_image_is_named_once_and_stays_named_after_a_kill(few: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(few, tmp_path / "photos")
    for c in range(6):
        (broken / f"class{c}" / "0.png").write_text("no picture")
    notes = Notes()
    with pytest.raises(Stop):
        run(broken, tmp_path / "run", watcher=StopAfter(5), train__save_every=2, **SHORT)
    done = run(broken, tmp_path / "run", resume=True, watcher=notes, **SHORT)
    assert len(done.result.bad_images) == 6
    assert not [said for said in notes.said if "cannot be read" in said], "named in the first sitting already"
    straight = run(broken, tmp_path / "straight", **SHORT)
    assert straight.result.bad_images.keys() == done.result.bad_images.keys()
    assert straight.result.curve == done.result.curve


def test_the_optimisers_memory_lies_as_the_weights_do(tmp_path: Path) -> None:
    """A file stores no memory layout, but a fused step needs the optimiser state in the layout of the weights."""

    def steps(count: int, resumed: Checkpoint | None = None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        images = torch.randn(2, 3, 8, 8)
        if resumed is not None:
            resumed.load_into(net, "net.", "this net")
            load_optimizer(optimizer, resumed.under("optimizer."))
        for _ in range(count):
            optimizer.zero_grad()
            net(images).square().sum().backward()
            optimizer.step()
        return net, optimizer

    net, optimizer = steps(3)
    Checkpoint(module_tensors(net, "net.") | optimizer_tensors(optimizer), {}).write(tmp_path / "three.safetensors")
    again, memory = steps(2, Checkpoint.read(tmp_path / "three.safetensors"))
    assert [v["exp_avg"].stride() for v in memory.state.values()] == [p.stride() for p in net.parameters()]
    assert all(map(torch.equal, again.parameters(), steps(5)[0].parameters()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU, where convolutions are laid out otherwise")
def test_goes_on_on_a_gpu(few: Path, tmp_path: Path) -> None:
    out, straight = tmp_path / "run", tmp_path / "straight"
    settings = SHORT | {"method": "proxy-anchor", "train__save_every": 2, "train__device": "cuda"}
    run(few, straight, watcher=Snapshot(5, straight, out), **settings)
    run(few, out, resume=True, **settings)
    assert (state(out)["step"], state(straight)["step"]) == (6, 6)
