"""A run weighs its classes by the numbers of its training images, or by lists with a number for each class."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxymetric.models.proxies import load_proxies
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.files import read_json
from proxymetric.weightings import ClassBalance
from training_runs import Snapshot, run, same_run

pytestmark = pytest.mark.usefixtures("only_training")
SHORT = {"train__epochs": 2, "train__warmup": 1}
BY_FREQUENCY = {"method": "cosface", "loss__weights": "frequency", "loss__margins": "frequency"}


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six classes, the first of which has fewer images than the others."""
    from conftest import write_photos

    folder = write_photos(tmp_path_factory.mktemp("uneven") / "photos", classes=6, images=6)
    for image in sorted(sorted(folder.iterdir())[0].iterdir())[3:]:
        image.unlink()
    return folder


def test_numbers_of_images_are_counted_recorded_and_the_same_after_a_kill(uneven: Path, tmp_path: Path) -> None:
    settings = SHORT | BY_FREQUENCY | {"train__save_every": 2}
    out, straight = tmp_path / "run", tmp_path / "straight"
    run(uneven, straight, watcher=Snapshot(4, straight, out), **settings)
    run(uneven, out, resume=True, **settings)
    same_run(out, straight)
    description = read_json(out / "run.json")
    counts = description["class_counts"]
    assert counts == [len(list((uneven / name).iterdir())) for name in description["classes"]]
    expected = ClassBalance(len(counts), "frequency", "frequency", counts, margin=0.35)
    tensors = Checkpoint.read(out / "last.safetensors").under("criterion.objective.weighting.")
    assert tensors["weights"].tolist() == expected.weights.tolist()
    assert tensors["margins"].tolist() == expected.margins.tolist()
    assert description["recipe"]["loss"]["counts"] is None, "the recipe stays what the user wrote"
    assert load_proxies(out, 8) is not None


def test_a_refit_counts_the_images_of_all_classes(uneven: Path, tmp_path: Path) -> None:
    run(uneven, tmp_path / "run", **SHORT, **BY_FREQUENCY, train__refit=True, seed=1)
    assert sorted(read_json(tmp_path / "run" / "refit" / "run.json")["class_counts"]) == [3, 6, 6, 6, 6, 6]


def test_the_base_of_a_method_is_weighed_too(uneven: Path, tmp_path: Path) -> None:
    base = {"method": "proxy-anchor", "weights": "frequency"}
    run(uneven, tmp_path / "run", method="ccp", loss__base=base, **SHORT)
    counts = read_json(tmp_path / "run" / "run.json")["class_counts"]
    tensors = Checkpoint.read(tmp_path / "run" / "last.safetensors").tensors
    (weights,) = (value for name, value in tensors.items() if name.endswith("weighting.weights"))
    assert weights.tolist() == ClassBalance(len(counts), "frequency", counts=counts).weights.tolist()


def test_lists_with_a_number_for_each_training_class(uneven: Path, tmp_path: Path) -> None:
    weights = {"method": "cosface", "loss__weights": [1.0, 2.0, 3.0, 4.0]}
    run(uneven, tmp_path / "run", **SHORT, **weights)
    tensors = Checkpoint.read(tmp_path / "run" / "last.safetensors").under("criterion.objective.weighting.")
    assert tensors["weights"].tolist() == [1, 2, 3, 4]
    assert "class_counts" not in read_json(tmp_path / "run" / "run.json")
    with pytest.raises(ValueError, match="weights: got 4 numbers, expected 3, one for each class"):
        run(uneven, tmp_path / "other", data__validation=0.5, **SHORT, **weights)
    with pytest.raises(ValueError, match=r"train\.refit: got true with 4 numbers in loss\.weights; expected"):
        run(uneven, tmp_path / "other", train__refit=True, **SHORT, **weights)
    assert not (tmp_path / "other" / "run.json").exists()
