"""Mistakes of users and damaged files: each gives one sentence, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import proxymetric as pm
from conftest import write_photos
from proxymetric.data import split
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.files import read_json
from terminal import bytes_of, proxymetric, refused, train

pytestmark = pytest.mark.usefixtures("no_page")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six classes of four photos, to be damaged."""
    return write_photos(tmp_path / "data", classes=6, images=4)


def unreadable(file: Path, how: str) -> Path:
    """Damage an image file; a JPEG where it is cut short."""
    if how == "truncated":
        Image.linear_gradient("L").save(file.with_suffix(".jpg"))
        whole = file.with_suffix(".jpg").read_bytes()
        file.unlink()
        file = file.with_suffix(".jpg")
        file.write_bytes(whole[: len(whole) // 2])
    else:
        file.write_bytes(b"" if how == "empty" else b"not an image, though it is called one")
    return file


# Data


def test_an_empty_folder(tmp_path):
    (tmp_path / "data").mkdir()
    answer = train(tmp_path / "data", tmp_path / "run")
    refused(
        answer, f"data: got {tmp_path / 'data'} with no labelled images", "one folder for each class", "CLASS/photo.jpg"
    )
    assert not (tmp_path / "run").exists()


def test_images_in_no_class_folder(tmp_path, photos):
    shutil.copytree(photos / "class0", tmp_path / "data")
    refused(train(tmp_path / "data", tmp_path / "run"), "and 8 images outside class folders")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "said"), [("nowhere", "which does not exist"), ("glyph", "did you mean 'glyphs'?")])
def test_a_missing_folder(tmp_path, name, said):
    refused(train(name, tmp_path / "run"), f"'{name}'", said, "a folder, a .csv or .npz file or one of the")
    assert not (tmp_path / "run").exists()


def test_no_data_at_all(tmp_path):
    refused(proxymetric("train", "--out", tmp_path / "run"), "data: got nothing, expected --data")
    assert not (tmp_path / "run").exists()


def test_one_class(tmp_path, photos):
    shutil.copytree(photos / "class0", tmp_path / "data" / "class0")
    refused(train(tmp_path / "data", tmp_path / "run"), "one class only ('class0')", "at least two classes")
    assert not (tmp_path / "run").exists()


def test_two_classes_cannot_be_divided_but_can_be_trained_on(tmp_path):
    data = write_photos(tmp_path / "data", classes=2, images=4)
    refused(train(data, tmp_path / "run"), "got 2 classes", "leaves 0 for training", "--set data.validation=0")
    assert not (tmp_path / "run").exists()
    answer = train(data, tmp_path / "run", "--set", "data.validation=0")
    assert answer.code == 0, answer
    assert pm.load(tmp_path / "run").classes == ["class0", "class1"]


def test_classes_too_small_to_be_held_out(tmp_path):
    data = write_photos(tmp_path / "data", classes=6, images=1)
    refused(train(data, tmp_path / "run"), "holds out 2 classes of two images or more", "expected at most 0 of the 6")
    assert not (tmp_path / "run").exists()


def test_a_class_with_one_image_is_said_and_trained_on(data, tmp_path):
    for file in sorted((data / "class2").iterdir())[1:]:
        file.unlink()
    answer = train(data, tmp_path / "run")
    assert answer.code == 0, answer
    assert "classes with a single image: 1, such as class2" in answer.err
    assert "class2" in pm.load(tmp_path / "run").classes


@pytest.mark.parametrize("more", [(), ("--frozen",), ("--set", "data.cache=device"), ("--set", "data.workers=1")])
def test_bad_images_are_named_once_counted_and_left_out(data, tmp_path, more):
    parts = split(pm.open_data(data))
    bad = {
        unreadable(data / parts.train.classes[0] / "0.png", "truncated"): "truncated",
        unreadable(data / parts.train.classes[1] / "1.png", "text"): "the image format is not recognised",
        unreadable(data / parts.train.classes[2] / "2.png", "empty"): "the file is empty",
        unreadable(data / parts.validation.classes[0] / "3.png", "text"): "the image format is not recognised",
    }
    answer = train(data, tmp_path / "run", "--batch", 4, "--epochs", 2, *more)
    assert answer.code == 0, answer
    found = read_json(tmp_path / "run" / "result.json")["bad_images"]
    assert found.keys() == {str(file) for file in bad}
    for file, reason in bad.items():
        assert reason in found[str(file)]
        assert answer.err.count(str(file)) == 1
    assert "images that could not be read and were left out: 4" in answer.out
    assert "scores on the 7 images of 2 held-out classes that chose it" in answer.out
    counts = read_json(tmp_path / "run" / "result.json")["data"]
    assert (counts["train"]["images"], counts["validation"]["images"]) == (13, 7)


def test_a_refit_counts_the_images_that_it_could_read(data, tmp_path):
    unreadable(data / split(pm.open_data(data)).train.classes[0] / "0.png", "text")
    answer = train(data, tmp_path / "run", "--batch", 4, "--epochs", 3, "--lr", "1e-2", "--refit")
    assert answer.code == 0, answer
    assert read_json(tmp_path / "run" / "result.json")["refit"]["images"] == 23


def test_a_class_of_nothing_but_bad_images(data, tmp_path):
    seen = split(pm.open_data(data)).train.classes[0]
    for file in (data / seen).iterdir():
        unreadable(file, "text")
    answer = train(data, tmp_path / "run")
    assert answer.code == 0, answer
    assert len(read_json(tmp_path / "run" / "result.json")["bad_images"]) == 4


@pytest.mark.parametrize("more", [(), ("--frozen",), ("--size", 80, "--set", "view.resize=80")])
def test_held_out_images_of_which_none_can_be_read(data, tmp_path, more):
    for name in split(pm.open_data(data)).validation.classes:
        for file in (data / name).iterdir():
            unreadable(file, "text")
    refused(train(data, tmp_path / "run", *more), "data: got 8 images", "none of which can be read")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [(), ("--frozen",), ("--set", "data.cache=memory")])
def test_training_images_of_which_none_can_be_read(data, tmp_path, more):
    for name in split(pm.open_data(data)).train.classes:
        for file in (data / name).iterdir():
            unreadable(file, "text")
    refused(train(data, tmp_path / "run", *more), "data: got 16 training images, none of which can be read")
    last = tmp_path / "run" / "last.safetensors"
    assert not last.exists() or Checkpoint.read(last).state["step"] == 0, "no step was made"


# Keys, values and names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "loss.margn=0.2"), ("loss.margn", "did you mean 'margin'?")),
        (("--set", "margin=0.2"), ("'margin'", "did you mean 'loss.margin'?")),
        (("--set", "loss.margin=small"), ("loss.margin: got 'small', expected a number",)),
        (("--set", "loss.margin"), ("got 'loss.margin', expected table.key=value",)),
        (("--set", "loss.margin=-9"), ("margin: got -9", "expected a number from -1 to 1", "cosines")),
        (("--set", "train.epochs=1.5"), ("train.epochs: got 1.5, expected a whole number",)),
        (("--lr", "-1"), ("train.lr: got -1.0, expected at least 0",)),
        (("--epochs", "0"), ("train.epochs: got 0, expected at least 1",)),
        (("--dim", "0"), ("dim", "0")),
        (("--size", "0"), ("size", "0")),
        (("--cache", "memry"), ("data.cache: got 'memry'", "did you mean 'memory'?")),
        (("--method", "proxyanchor"), ("method: got 'proxyanchor'", "did you mean 'proxy-anchor'?")),
        (("--backbone", "resnet_50"), ("backbone: got 'resnet_50'", "resnet50")),
        (("--set", "train.metrics=['R@1', 'MAP']"), ("metrics: got 'MAP'", "did you mean 'MAP@R'?")),
        (("--set", "train.monitor=R@2"), ("train.monitor", "'R@2'", "did you mean 'R@1'?")),
        (("--set", "view.crop=centre"), ("view.crop: got 'centre', expected one of random-resized, random, none",)),
        (("--set", "view.erase=1.5"), ("view.erase: got 1.5, expected a probability in 0..1",)),
        (("--set", "loss.init=zeros"), ("init: got 'zeros'", "kaiming")),
        (("--set", "train.per_class=5"), ("per_class: got 5", "batch=16")),
        (("--device", "gpu"), ("device: got 'gpu'", "cuda")),
        (
            ("--device", "mps"),
            ("device: got 'mps', expected auto, cpu, cuda", "Apple's GPU lacks the float64"),
        ),
        (("--device", "meta"), ("device: got 'meta', expected auto, cpu, cuda or cuda:0",)),
        (("--weights", "weights.pth"), ("weights.pth", "pickle", "expected a .safetensors file")),
        (("--weights", "gone.safetensors"), ("gone.safetensors", "does not exist")),
        (("--recipe", "gone.toml"), ("recipe: got 'gone.toml', expected a TOML file or the name of a shipped recipe",)),
        (("--resume", "--overwrite"), ("resume, overwrite: got both",)),
    ],
)
def test_a_wrong_word_writes_nothing(photos, tmp_path, words, said):
    refused(train(photos, tmp_path / "run", *words), *said)
    assert not (tmp_path / "run").exists()


def test_a_wrong_word_with_overwrite_costs_no_earlier_run(photos, run):
    before = bytes_of(run)
    refused(train(photos, run, "--overwrite", "--set", "loss.margn=0.2"), "loss.margn")
    refused(train(photos, run, "--overwrite", "--set", "loss.init=zeros"), "init: got 'zeros'")
    refused(train(run.parent / "gone", run, "--overwrite"), "which does not exist")
    assert bytes_of(run) == before


@pytest.mark.filterwarnings("default")
def test_a_warning_is_a_sentence_without_code(photos, tmp_path):
    answer = train(photos, tmp_path / "run", "--set", "loss.scale=20000")
    assert answer.code == 0, answer.err
    (line,) = [line for line in answer.err.splitlines() if "scale" in line]
    assert line.startswith("proxymetric: warning: scale: got 20000.0, expected a number from ")
    assert "checks.py" not in answer.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[loss]\nmargn = 0.2\n", "loss.margn: got an unknown key, expected a key of [loss]; did you mean 'margin'?"),
        ("[los]\nmargin = 0.2\n", "loss, train; did you mean 'loss'?"),
        ("[loss]\nmargin = '0.2'\n", "loss.margin: got '0.2', expected a number"),
        ("[loss\n", "mine.toml, expected valid TOML"),
    ],
)
def test_a_mistake_in_a_recipe_file(photos, tmp_path, content, said):
    (tmp_path / "mine.toml").write_text(content)
    refused(train(photos, tmp_path / "run", "--recipe", tmp_path / "mine.toml"), said)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(photos, tmp_path, run):
    refused(
        train(photos, tmp_path / "new", "--device", "cuda"),
        "device: got 'cuda:0'",
        "no CUDA device",
        "expected cpu or auto",
    )
    assert not (tmp_path / "new").exists()
    refused(proxymetric("evaluate", run, "--device", "cuda"), "no CUDA device")


# Checkpoints


def test_weights_of_another_backbone(photos, tmp_path):
    file = tmp_path / "resnet.safetensors"
    save_file({f"layer{i}.0.conv1.weight": torch.ones(2) for i in (1, 2, 3, 4)}, str(file))
    answer = train(photos, tmp_path / "run", "--weights", file)
    refused(answer, str(file), "do not fit backbone='small'", "looks like a ResNet")
    assert not (tmp_path / "run").exists()


def test_a_model_of_another_run_is_refused(photos, run, tmp_path):
    assert train(photos, tmp_path / "wide", "--dim", 12).code == 0
    shutil.copy(tmp_path / "wide" / "best.safetensors", run)
    answer = proxymetric("evaluate", run)
    refused(answer, f"{run / 'best.safetensors'} does not fit the encoder of {run} (small)", "(12, 256)", "(8, 256)")


def test_a_checkpoint_of_another_backbone(run):
    about = read_json(run / "run.json")
    about["encoder"]["backbone"] = "resnet10t"
    (run / "run.json").write_text(json.dumps(about))
    refused(proxymetric("evaluate", run), "does not fit the encoder of", "(resnet10t)", "got no tensor, expected one")
    with pytest.raises(ValueError, match=r"\(resnet10t\)"):
        pm.load(run)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda about: about.pop("view"), "got no view, expected a file that"),
        (lambda about: about["encoder"].update(colour="red"), "colour"),
        (lambda about: about["encoder"].update(backbone="smal"), "backbone: got 'smal'"),
    ],
)
def test_a_run_file_that_was_edited(run, damage, said):
    about = read_json(run / "run.json")
    damage(about)
    (run / "run.json").write_text(json.dumps(about))
    refused(proxymetric("evaluate", run), said)


def test_a_run_file_that_is_cut_short(photos, run):
    (run / "run.json").write_text((run / "run.json").read_text()[:100])
    refused(proxymetric("evaluate", run), str(run / "run.json"), "not valid JSON")
    refused(train(photos, run, "--resume"), str(run / "run.json"), "not valid JSON")
    assert train(photos, run, "--overwrite").code == 0


@pytest.mark.parametrize("kept", [0, 100, 20_000])
def test_a_damaged_checkpoint_cannot_be_gone_on_from_but_the_best_still_loads(photos, run, kept):
    last = run / "last.safetensors"
    last.write_bytes(last.read_bytes()[:kept])
    before = bytes_of(run)
    refused(
        train(photos, run, "--resume", "--epochs", 2), str(last), "best.safetensors in the same folder", "--overwrite"
    )
    assert bytes_of(run) == before
    assert pm.load(run).embed(torch.zeros(1, 3, 16, 16)).shape == (1, 8)
    with pytest.raises(ValueError, match=r"last.safetensors: got a file that cannot be read"):
        pm.load(run, "last")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("optimizer.0.step", None, "optimizer.0.step: got no tensor, expected one"),
        ("optimizer.0.step", lambda step: step.expand(8, 256), "optimizer.0.step: got shape (8, 256)"),
        (
            "optimizer.0.exp_avg",
            lambda mean: mean.reshape(-1),
            "optimizer.0.exp_avg: got shape (2048,), expected (8, 256)",
        ),
        ("optimizer.0.step", lambda step: step.bool(), "optimizer.0.step: got torch.bool, expected a type of floating"),
        ("optimizer.999.step", lambda _: torch.ones(()), "optimizer.999: got an unknown parameter"),
        ("optimizer.x.step", lambda _: torch.ones(()), "optimizer.-1: got an unknown parameter"),
    ],
)
def test_a_changed_state_of_the_optimiser_is_refused(run, name, change, said):
    checkpoint = Checkpoint.read(run / "last.safetensors")
    tensor = checkpoint.tensors.pop(name, None)
    if change is not None:
        checkpoint.tensors[name] = change(tensor).contiguous()
    checkpoint.write(run / "last.safetensors")
    before = bytes_of(run)
    refused(proxymetric("train", "--out", run, "--resume", "--epochs", "2"), "does not fit the optimiser", said)
    assert bytes_of(run) == before


def test_a_model_is_no_checkpoint_to_go_on_from(photos, run):
    shutil.copy(run / "best.safetensors", run / "last.safetensors")
    refused(train(photos, run, "--resume", "--epochs", 2), "which holds a model, but no state of the training")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("--set", "loss.margin=0.3"), "loss.margin=0.3, expected 0.1"),
        (("--batch", 8), "train.batch=8, expected 16"),
        (("--seed", 1), "seed=1, expected 0"),
        (("--method", "mpa"), "method='mpa', expected 'proxy-anchor'"),
    ],
)
def test_resume_with_a_changed_recipe_names_the_key(photos, run, words, key):
    before = bytes_of(run)
    refused(train(photos, run, "--resume", *words), f"the value that {run} began with", key, "or a new run with --out")
    assert bytes_of(run) == before


def test_images_that_are_gone_or_others_when_a_run_goes_on(tmp_path, data):
    assert train(data, tmp_path / "run").code == 0
    before = bytes_of(tmp_path / "run")
    aside = data.rename(tmp_path / "aside")
    refused(
        proxymetric("train", "--out", tmp_path / "run", "--resume", "--epochs", 2), "which does not exist", str(data)
    )
    (aside / "class0" / "0.png").rename(tmp_path / "0.png")
    words = ("train", "--data", aside, "--out", tmp_path / "run", "--resume", "--epochs", 2)
    refused(
        proxymetric(*words),
        f"resume: got {aside} (23 images of 6 classes), whose images are not those that {tmp_path / 'run'} began with",
        f"expected the images of {data} (24 images of 6 classes), or a new run with --out",
    )
    assert bytes_of(tmp_path / "run") == before
    (tmp_path / "0.png").rename(aside / "class0" / "0.png")
    assert proxymetric(*words).code == 0
    Image.new("RGB", (16, 16)).save(aside / "class0" / "new.png")
    refused(
        proxymetric(*words[:-1], 3),
        f"resume: got {aside}, whose images are not those",
        "(it has 25 images of 6 classes, and had 24 images of 6 classes)",
    )


# The folder of the run


def test_out_that_holds_a_run(photos, run):
    before = bytes_of(run)
    refused(
        train(photos, run), f"out: got {run}, which already holds a run", "--resume", "--overwrite", "another folder"
    )
    assert bytes_of(run) == before


@pytest.mark.parametrize("words", [(), ("--overwrite",), ("--resume",)])
def test_out_that_is_somebody_elses(photos, tmp_path, words):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear reader")
    refused(
        train(photos, tmp_path / "mine", *words), f"out: got {tmp_path / 'mine'}, which is not empty", "a new folder"
    )
    assert bytes_of(tmp_path / "mine") == {"letter.txt": b"dear reader"}


def test_overwrite_leaves_strangers_files(photos, run):
    (run / "notes.txt").write_text("dear reader")
    assert train(photos, run, "--overwrite", "--dim", 4).code == 0
    assert (run / "notes.txt").read_text() == "dear reader"
    assert pm.load(run).dim == 4


@pytest.mark.parametrize("below", [".", "deeper"])
def test_out_that_is_a_file(photos, tmp_path, below):
    (tmp_path / "run").write_text("a file")
    refused(
        train(photos, tmp_path / "run" / below), f"out: got {tmp_path / 'run'}, which is a file", "expected a folder"
    )
    assert (tmp_path / "run").read_text() == "a file"


def test_out_where_nothing_can_be_written(photos, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    if not os.access(locked, os.W_OK):
        refused(train(photos, locked / "run"), f"out: got {locked}, which cannot be written")
    elif Path("/proc/self").exists():  # root may write everywhere, except where the system itself refuses
        refused(train(photos, "/proc/proxymetric/run"), "out: got /proc/proxymetric/run, which cannot be created")
    assert not list(locked.iterdir())


# The command line, and what is checked before the images are listed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--size", "６４"), "'--size': got '６４', expected a whole number, in the digits 0 to 9"),
        (("--seed", "abc"), "'--seed': got 'abc', expected a whole number, in the digits 0 to 9"),
        (("--lr", "fast"), "'--lr': got 'fast', expected a number, such as 0.1"),
    ],
)
def test_a_wrong_number_is_shown(words, said):
    answer = proxymetric("train", "--data", "photos", *words)
    assert answer.code == 2
    assert said in answer.err


def test_a_word_without_an_option_gets_the_option_of_the_data():
    for words in (("train", "photos"), ("evaluate", "runs/k", "photos")):
        answer = proxymetric(*words)
        assert answer.code == 2
        assert "(photos); did you mean '--data photos'?" in answer.err
    for words in (("train", "--data", "photos", "more"), ("export", "runs/k", "more")):
        assert "did you mean" not in proxymetric(*words).err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--backbone", "smal"), "backbone: got 'smal', expected small"),
        (("--dim", "-5"), "encoder.dim: got -5, expected at least 1"),
        (("--set", "encoder.dim=0"), "encoder.dim: got 0, expected at least 1"),
    ],
)
def test_a_wrong_encoder_is_refused_before_the_images_are_opened(photos, tmp_path, words, said):
    answer = train(photos, tmp_path / "run", *words)
    refused(answer, said)
    assert "opening" not in answer.out


def test_weights_that_do_not_fit_are_refused_before_the_images_are_opened(photos, tmp_path):
    save_file({"conv1.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    answer = train(photos, tmp_path / "run", "--weights", tmp_path / "other.safetensors")
    refused(answer, "whose tensors do not fit backbone='small'")
    assert "opening" not in answer.out
    refused(train(photos, tmp_path / "run", "--weights", tmp_path), f"{str(tmp_path)!r}, a folder; expected the path")
    assert "did you mean" in train(photos, tmp_path / "run", "--weights", tmp_path).err
    refused(train("nowhere", tmp_path / "run", "--weights", tmp_path), "data: got 'nowhere', which does not exist")


def test_a_misspelt_run_is_not_begun_beside_the_one_to_continue(photos, run, tmp_path):
    unfinished = run.rename(tmp_path / "nic")
    assert train(photos, tmp_path / "nix", "--resume").code == 0, "the other run is finished"
    shutil.rmtree(tmp_path / "nix")
    (unfinished / "result.json").unlink()
    said = f"resume: got {tmp_path / 'nix'}, which holds no run, expected the folder of a run to continue"
    refused(train(photos, tmp_path / "nix", "--resume"), said, f"did you mean {str(unfinished)!r}?")
    assert not (tmp_path / "nix").exists()
    assert train(photos, tmp_path / "nix").code == 0
    assert train(photos, tmp_path / "another", "--resume").code == 0


def test_auto_without_trials_says_so_at_the_end(photos, tmp_path):
    answer = train(photos, tmp_path / "run", "--method", "auto")
    assert answer.code == 0, answer
    assert "--method auto took proxy-anchor: no trials: " in answer.out[answer.out.index("epoch 1 of") :]
