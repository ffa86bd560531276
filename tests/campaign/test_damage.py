"""A run whose files are damaged or lost: every verb gives the result of the whole run, or one sentence."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from campaign_cases import SEED, check_sentence, contents, some
from proxymetric.search import VectorFile
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.files import read_json
from terminal import proxymetric, train

pytestmark = pytest.mark.slow
PARTS = ("run.json", "last.safetensors", "best.safetensors", "log.jsonl", "result.json")


def flipped(place: float) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        position = min(len(content) - 1, int(place * len(content)))
        return content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :]

    return change


def without_a_key(content: bytes) -> bytes:
    table = json.loads(content)
    del table[random.Random(SEED).choice(sorted(table))]
    return json.dumps(table).encode()


def with_wrong_types(content: bytes) -> bytes:
    return json.dumps(
        {key: [1] if not isinstance(value, list) else 1 for key, value in json.loads(content).items()}
    ).encode()


DAMAGES: dict[str, Callable[[bytes], bytes] | None] = {
    "missing": None,
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "one byte less": lambda content: content[:-1],
    "more": lambda content: content + b"x",
    "object": lambda content: b"{}",
    "list": lambda content: b"[]",
    "null": lambda content: b"null",
    "binary": lambda content: b"\xff\xfe\x00" * 50,
    **{f"flipped at {place}": flipped(place) for place in (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.999)},
}
JSON_DAMAGES = {"a key less": without_a_key, "wrong types": with_wrong_types}
VERBS = ("resume", "longer", "evaluate", "embed", "search", "report")
CASES = [
    (part, damage, verb)
    for part in PARTS
    for damage in (*DAMAGES, *(JSON_DAMAGES if part in ("run.json", "result.json") else ()))
    for verb in VERBS
]


def answer_of(verb: str, run: Path, photos: Path, out: Path) -> object:
    """The outcome of a verb, for comparisons; a refusal is an `Answer` with code 1."""
    image = next(photos.rglob("*.png"))
    words: dict[str, tuple[object, ...]] = {
        "resume": ("train", "--out", run, "--resume"),
        "longer": ("train", "--out", run, "--resume", "--epochs", 3),
        "evaluate": ("evaluate", run, "--metrics", "R@1,MAP@R"),
        "embed": ("embed", run, photos, "--out", out / "vectors.safetensors"),
        "search": ("search", run, image, "--in", photos, "-k", 3),
        "report": ("evaluate", run, "--redraw"),
    }
    answer = proxymetric(*words[verb])
    if answer.code != 0:
        return answer
    if verb in ("resume", "longer"):
        result = read_json(run / "result.json")
        tensors = Checkpoint.read(run / "last.safetensors").tensors
        return (
            result["rows"],
            result["chosen_epoch"],
            result["curve"],
            {k: v.numpy().tobytes() for k, v in tensors.items()},
        )
    if verb == "embed":
        return VectorFile.load(out / "vectors.safetensors").vectors.numpy().tobytes()
    if verb == "report":
        return (run / "report.html").stat().st_size > 1000
    # Without result.json a run is rightly said to be not finished; its scores must be the same.
    lines = [line for line in answer.out.splitlines() if not line.startswith(f"{run} is not finished")]
    return [line for line in lines if any(character.isdigit() for character in line)][-8:]


@pytest.fixture(scope="module")
def whole(photos, tmp_path_factory) -> tuple[Path, dict[str, object]]:
    """A finished run of two epochs, and the outcome of every verb on it."""
    root = tmp_path_factory.mktemp("whole")
    assert train(photos, root / "run", "--epochs", 2, "--set", "train.lr=0.003").code == 0
    said = {}
    for verb in VERBS:
        shutil.rmtree(root / "copy", ignore_errors=True)
        shutil.copytree(root / "run", root / "copy")
        (root / verb).mkdir()
        said[verb] = answer_of(verb, root / "copy", photos, root / verb)
        assert not hasattr(said[verb], "code"), said[verb]
    return root, said


@pytest.mark.slow(cases=6)
@pytest.mark.parametrize(("part", "damage", "verb"), some(CASES))
def test_a_damaged_run_is_right_or_refused(whole, photos, part, damage, verb):
    root, said = whole
    run, out = root / "copy", root / "out"
    for folder in (run, out):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "run", run)
    out.mkdir()
    change = (DAMAGES | JSON_DAMAGES)[damage]
    if change is None:
        (run / part).unlink()
    else:
        (run / part).write_bytes(change((run / part).read_bytes()))
    before = contents(run)
    answer = answer_of(verb, run, photos, out)
    if hasattr(answer, "code"):
        assert answer.code == 1, answer
        check_sentence(answer.err)
        assert contents(run) == before, "a refused verb changed the run"
        assert not contents(out)
    else:
        assert answer == said[verb], "a result that is not that of the whole run"


def test_what_is_compared_can_differ(whole, photos):
    """The comparison notices another model."""
    root, said = whole
    run = root / "other"
    shutil.copytree(root / "run", run)
    checkpoint = Checkpoint.read(run / "best.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, value in checkpoint.tensors.items():
        if name.startswith("encoder.") and value.is_floating_point() and value.ndim > 1:
            checkpoint.tensors[name] = torch.randn(value.shape, generator=generator)
    checkpoint.write(run / "best.safetensors")
    assert answer_of("evaluate", run, photos, root) != said["evaluate"]
