"""Parts of a run that are damaged or missing: one sentence that names the file and the way out, and nothing changes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import proxymetric as pm
from proxymetric.system.files import read_json
from terminal import bytes_of, finished_run, proxymetric, refused, train

pytestmark = pytest.mark.usefixtures("only_training")


@pytest.fixture(scope="module")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(photos, tmp_path_factory.mktemp("runs") / "finished", "--epochs", 2, "--set", "train.warmup=0")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def resume(run: Path, *words: object):
    return proxymetric("train", "--out", run, "--resume", *words)


def unchanged(run: Path, before: dict[str, bytes]) -> None:
    assert bytes_of(run) == before


@pytest.mark.slow
def test_a_lost_best_is_not_replaced_by_last(run):
    (run / "best.safetensors").unlink()
    before = bytes_of(run)
    refused(resume(run), str(run / "best.safetensors"), "is missing", "--overwrite", "--which last")
    forms = (("evaluate", run), ("evaluate", run, "--redraw"), ("embed", run, run), ("search", run, run, "--in", run))
    for words in forms:
        answer = proxymetric(*words)
        assert answer.code == 1, words
    refused(proxymetric("evaluate", run), "best.safetensors is missing", "--which last")
    unchanged(run, before)
    assert proxymetric("evaluate", run, "--which", "last", "--metrics", "R@1").code == 0


def test_without_held_out_classes_last_is_the_model(photos, tmp_path):
    run = tmp_path / "run"
    assert train(photos, run, "--protocol", "last").code == 0
    assert not (run / "best.safetensors").exists()
    assert pm.load(run).dim == 8
    assert resume(run).code == 0


@pytest.mark.parametrize("there", ["result.json", "best.safetensors", "log.jsonl"])
def test_a_lost_last_does_not_start_again_silently(run, there):
    for name in {"last.safetensors", "result.json", "best.safetensors", "log.jsonl"} - {there}:
        (run / name).unlink()
    before = bytes_of(run)
    refused(resume(run), str(run / "last.safetensors"), "is missing", there, "--overwrite")
    unchanged(run, before)


RUN_JSON = {
    "empty table": lambda about: {},
    "list": lambda about: [],
    "null": lambda about: None,
    "no data": lambda about: {k: v for k, v in about.items() if k != "data"},
    "said is a list": lambda about: about | {"said": [1]},
    "encoder of a newer version": lambda about: about | {"encoder": about["encoder"] | {"new_key": 1}},
    "dim is text": lambda about: about | {"encoder": about["encoder"] | {"dim": "x"}},
    "recipe without train": lambda about: (
        about | {"recipe": {k: v for k, v in about["recipe"].items() if k != "train"}}
    ),
    "no identity": lambda about: about | {"data": {"name": "photos"}},
    "classes are numbers": lambda about: about | {"classes": [1, 2]},
    "normalise": lambda about: about | {"normalise": "l7"},
    "view": lambda about: about | {"view": {"sise": 16}},
}


@pytest.mark.parametrize("damage", RUN_JSON)
def test_a_damaged_run_json_is_a_sentence_for_every_verb(run, damage):
    about = RUN_JSON[damage](read_json(run / "run.json"))
    (run / "run.json").write_text(json.dumps(about))
    before = bytes_of(run)
    refused(proxymetric("evaluate", run), str(run / "run.json"))
    if damage != "view":  # only code that uses the model reads it
        refused(resume(run, "--epochs", 3), str(run / "run.json"))
    refused(proxymetric("export", run, "--slim", run.parent / "m.safetensors"), str(run / "run.json"))
    unchanged(run, before)


@pytest.mark.parametrize("table", ["recipe", "said"])
def test_a_key_of_a_newer_version_names_both_versions(run, table):
    about = read_json(run / "run.json")
    about[table]["train"]["new_key"] = 3
    about["recipe"]["train"]["new_key"] = 3
    about["versions"]["proxymetric"] = "99.1.0"
    (run / "run.json").write_text(json.dumps(about))
    refused(resume(run), "99.1.0", pm.__version__, "newer")
    refused(proxymetric("evaluate", run), "99.1.0", pm.__version__, "newer")
    about["versions"]["proxymetric"] = pm.__version__
    (run / "run.json").write_text(json.dumps(about))
    refused(resume(run), "train.new_key", "this version does not know", pm.__version__)


@pytest.mark.parametrize("content", ["[]", "{}", "null", "3", '{"steps": 8', '{"rows": []}'])
def test_a_damaged_result_is_written_again(run, content):
    whole = read_json(run / "result.json")
    (run / "result.json").write_text(content)
    refused(proxymetric("evaluate", run, "--redraw"), str(run / "result.json"))
    answer = resume(run)
    assert answer.code == 0, answer
    again = read_json(run / "result.json")
    assert again["rows"] == whole["rows"]
    assert again["chosen_epoch"] == whole["chosen_epoch"]


@pytest.mark.parametrize("key", ["recipe", "curve", "rows", "machine", "seconds"])
def test_a_result_with_values_of_wrong_types_is_no_traceback(run, key):
    result = read_json(run / "result.json")
    (run / "result.json").write_text(json.dumps(result | {key: "x"}))
    refused(proxymetric("evaluate", run, "--redraw"), str(run / "result.json"), key)
    (run / "result.json").write_text(json.dumps(result | {"recipe": {}}))
    refused(proxymetric("evaluate", run, "--redraw"), str(run / "result.json"), "recipe")


def rewritten(file: Path, old: str, new: str) -> None:
    """Change the state in a checkpoint's header, without a checksum as in files of 0.1.0."""
    with safe_open(file, "pt") as opened:
        state = opened.metadata()["state"]
    assert old in state
    save_file(load_file(file), file, {"state": state.replace(old, new, 1)})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"epoch"', '"eposh"'),
        ('"curve": [', '"curve": [1, '),
        ('"best": [', '"best": 3, "b": ['),
        ('"facts": {', '"f": {'),
    ],
)
def test_a_damaged_header_without_checksum_is_a_sentence(run, old, new):
    rewritten(run / "last.safetensors", old, new)
    before = bytes_of(run)
    refused(resume(run, "--epochs", 3), str(run / "last.safetensors"), "--overwrite")
    unchanged(run, before)


@pytest.mark.parametrize("name", ["last.safetensors", "best.safetensors"])
@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_is_noticed_before_anything_is_done(run, name, seed):
    content, dice = bytearray((run / name).read_bytes()), random.Random(seed)
    start = 8 + int.from_bytes(content[:8], "little") if seed % 2 else 100
    content[dice.randrange(start, len(content) if seed % 2 else 300)] ^= 1 << dice.randrange(3)
    (run / name).write_bytes(content)
    before = bytes_of(run)
    refused(resume(run, "--epochs", 3), str(run / name))
    if name == "best.safetensors":
        refused(proxymetric("evaluate", run), str(run / name))
    unchanged(run, before)


def test_a_lost_refit_is_not_replaced_by_the_model_before_it(run):
    result = read_json(run / "result.json")
    (run / "result.json").write_text(json.dumps(result | {"refit": {"epochs": 1}}))
    refused(proxymetric("evaluate", run), "refit/result.json is missing", "--which chosen")


def test_the_nearest_run_is_named(run, tmp_path):
    shutil.copytree(run, tmp_path / "photos")
    shutil.copytree(run, tmp_path / "another")
    refused(proxymetric("evaluate", tmp_path / "photo"), f"did you mean '{tmp_path / 'photos'}'?")
