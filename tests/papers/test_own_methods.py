"""Methods of the user's own, named as "module:function": they train, resume, combine and are refused with a reason."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import proxymetric as pm
from proxymetric.papers import lookup, needs, options
from proxymetric.system.files import read_json
from terminal import proxymetric, refused
from training_runs import command, same_run

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "pieces.md"
MORE = """

from proxymetric.papers.about import about


@about(paper="You 2026, Mine", choose="never", needs=("epochs",))
def scheduled(classes, dim):
    return mine(classes, dim)


def flat(embeddings, labels):
    return embeddings.sum()


def empty(classes, dim):
    return None
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the file of the page, and some more functions."""
    text = PAGE.read_text(encoding="utf-8").partition("## A method of your own")[2]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    (tmp_path / "my_losses.py").write_text(code[1] + MORE)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_it_is_a_method_like_those_of_the_catalogue() -> None:
    criterion = pm.method("my_losses:mine", classes=5, dim=4, scale=8.0)
    queries, labels = torch.randn(6, 4), torch.arange(6) % 5
    vectors = torch.nn.functional.normalize(criterion.objective.source.vectors, dim=1)
    logits = 8 * torch.nn.functional.normalize(queries, dim=1) @ vectors.T
    torch.testing.assert_close(criterion(queries, labels), torch.nn.functional.cross_entropy(logits, labels))
    assert repr(criterion) == "Criterion('my_losses:mine', classes=5, dim=4, scale=8.0)"
    assert list(options("my_losses:mine")) == ["scale"]
    assert needs("my_losses:scheduled", {}) == {"epochs"}
    assert lookup("my_losses:mine").about.paper == "your own"
    assert "my_losses:mine" not in pm.methods()
    pm.method("ccp", classes=5, dim=4, base="my_losses:mine")


@pytest.mark.usefixtures("only_training")
def test_a_run_trains_and_continues_bit_for_bit(folder: Path, photos: Path) -> None:
    words = command(photos, folder / "whole", method="my_losses:mine", loss__scale=20.0, train__epochs=2)
    assert proxymetric(*words).code == 0
    assert read_json(folder / "whole" / "run.json")["recipe"]["loss"]["scale"] == 20.0
    words = command(photos, folder / "parts", method="my_losses:mine", loss__scale=20.0, train__epochs=1)
    assert proxymetric(*words).code == 0
    words = command(photos, folder / "parts", "--resume", method="my_losses:mine", loss__scale=20.0, train__epochs=2)
    assert proxymetric(*words).code == 0
    same_run(folder / "parts", folder / "whole")
    (folder / "my_losses.py").unlink()
    sys.modules.pop("my_losses")
    assert pm.load(folder / "whole").dim == 8, "a trained model does not need the file"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("my_losses:mien", "method: got 'my_losses:mien', but my_losses has no function 'mien'; did you mean 'mine'?"),
        ("my_loses:mine", "there is no module 'my_loses' in "),
        ("my_losses:", "method: got 'my_losses:', expected module:function, such as 'my_losses:better'"),
        ("my_losses:flat", "a function of (embeddings, labels); expected one of (classes, dim, ...) that returns an"),
        ("broken:mine", "but importing broken failed with ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("my_losses:empty", "objective: got NoneType, expected a Compare(loss, source) or a Sum of them"),
    ],
)
def test_what_is_no_method_is_refused(name: str, sentence: str, photos: Path, tmp_path: Path) -> None:
    refused(proxymetric(*command(photos, tmp_path / "run", method=name)), sentence)
    assert not (tmp_path / "run").exists()


def test_an_unknown_argument_is_refused(folder: Path, photos: Path) -> None:
    words = command(photos, folder / "run", method="my_losses:mine", loss__scal=3)
    refused(proxymetric(*words), "loss.scal: got an unknown key", "did you mean 'scale'?")


def test_a_missing_module_that_is_the_beginning_of_the_name_is_the_missing_one(tmp_path, monkeypatch):
    (tmp_path / "foozle_losses.py").write_text("import foozle\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match="importing foozle_losses failed with ModuleNotFoundError: No module named 'foozle'"
    ):
        pm.method("foozle_losses:mine", classes=3, dim=4)
