"""The edits of CONTRIBUTING.md work: each addition is a file and a line, and the library then knows it."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import proxymetric as pm
from proxymetric import papers
from proxymetric.core.pieces import Compare
from proxymetric.papers import CATALOGUE, CLOSED_FORMS
from proxymetric.papers.about import about
from proxymetric.runs.planning import Workload

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^`(src/[^`]+)`(, one line)?:\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EDITS = BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))

CHECKS = """
import doctest, sys
import proxymetric as pm
from proxymetric.runs.planning import Workload, memory_of

assert pm.__file__.startswith(sys.argv[1]), pm.__file__
assert "Better" in pm.losses.__all__ and "MeanProxies" in pm.sources.__all__
from proxymetric.losses import better as loss_file
from proxymetric.sources import mean_proxies as source_file
from proxymetric.weightings import rare_classes as weighting_file
from proxymetric.schemes import slow_start as scheme_file
for file in (loss_file, source_file, weighting_file, scheme_file):
    result = doctest.testmod(file)
    assert result.attempted and not result.failed, (file, result)

pm.testing.check_method("better")
pm.testing.check_method("better", rare=False)
pm.testing.check_method("xbm", base="better", start=0, memory=20)
pm.testing.check_method(
    lambda classes, dim: pm.Criterion(pm.schemes.SlowStart(pm.method("better", classes=classes, dim=dim).objective, 3))
)
assert Workload(1000, 8, 4, method="better").kind.over == "classes"

from proxymetric.runs import recipe
encoder = {"backbone": "test_vit", "tuning": "norms"}
complete = recipe.check({"method": "better", "loss": {"margin": 0.3}, "encoder": encoder})
assert complete.loss == {"scale": 16.0, "margin": 0.3, "rare": True, "nested": None}, complete.loss
assert complete.encoder["tuning"] == "norms"
try:
    recipe.check({"method": "better", "loss": {"margn": 0.3}})
except ValueError as error:
    assert "did you mean 'margin'?" in str(error), error
else:
    raise AssertionError("a wrong key is accepted")

from proxymetric.encoders import build
encoder = build("test_vit", pretrained=False, dim=8, size=32, tuning="norms+bitfit")
trained = {name for name, parameter in encoder.backbone.named_parameters() if parameter.requires_grad}
assert any(name.endswith("norm1.weight") for name in trained), trained
assert not any(name.endswith("qkv.weight") for name in trained), trained

from proxymetric.cli import main
sys.argv = ["proxymetric", *sys.argv[2:]]
main()
"""


def apply(root: Path) -> None:
    """Make the edits of CONTRIBUTING.md in a copy of the package."""
    for name, is_line, code in EDITS:
        file = root / name
        if not is_line:
            assert not file.exists(), f"{name} is new"
            file.write_text(code, encoding="utf-8")
            continue
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        if code.startswith("from "):
            imports = [i for i, line in enumerate(lines) if line.startswith("from proxymetric.")]
            place = next((i for i in imports if lines[i] > code), imports[-1] + 1)
        else:
            place = lines.index("    },\n")
        file.write_text("".join([*lines[:place], code, *lines[place:]]), encoding="utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("contributed")
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    apply(root)
    return root


def test_each_addition_is_a_file_and_a_line() -> None:
    files = [name for name, is_line, _ in EDITS if not is_line]
    lines = [(name, code) for name, is_line, code in EDITS if is_line]
    folders = ["losses", "sources", "weightings", "schemes", "encoders/tuning", "papers"]
    assert [Path(name).parent.as_posix() for name in files] == [f"src/proxymetric/{folder}" for folder in folders]
    assert [name for name, _ in lines] == [f"src/proxymetric/{folder}/__init__.py" for folder in folders]
    assert all(code.count("\n") == 1 for _, code in lines)


def test_the_additions_are_known_everywhere(copy: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(copy / "src"), "COLUMNS": "200"}
    command = [sys.executable, "-c", CHECKS, str(copy), "methods"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=copy)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert "You 2026" in answer.stdout
    assert "over mpa-dw when some classes have few images" in answer.stdout


def test_the_additions_keep_the_rules_of_style(copy: Path) -> None:
    new = [str(copy / name) for name, is_line, _ in EDITS if not is_line]
    changed = [str(copy / name) for name, is_line, _ in EDITS if is_line]
    for words in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--config", str(ROOT / "pyproject.toml"), *new, *changed]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=copy)
        assert answer.returncode == 0, answer.stdout + answer.stderr


def test_a_loss_that_ignores_the_weights_is_no_base_of_proxy_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ignores(pm.losses.ProxyAnchor):
        def __call__(self, queries, labels, refs, weight=None):
            return super().__call__(queries, labels, refs, None)

    def ignores(classes: int, dim: int) -> Compare:
        """A method whose loss takes weights and ignores them."""
        return Compare(Ignores(), pm.sources.LearnedProxies(classes, dim))

    monkeypatch.setitem(CATALOGUE, "ignores", about(paper="You 2026, Nothing", choose="never")(ignores))
    with pytest.raises(ValueError, match=r"base: got 'ignores', whose loss \(Ignores\) makes no use of the weights"):
        pm.method("proxy-isa", classes=5, dim=4, base="ignores", steps_per_epoch=1)


def test_a_method_without_sums_over_is_refused_by_the_plan_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(classes: int, dim: int) -> Compare:
        """A method whose row states nothing about its loss."""
        return Compare(pm.losses.ProxyAnchor(), pm.sources.LearnedProxies(classes, dim))

    monkeypatch.setitem(CATALOGUE, "silent", about(paper="You 2026, Nothing", choose="never")(silent))
    with pytest.raises(ValueError, match="method: got 'silent', which does not state in its catalogue row what its"):
        Workload(1000, 8, 4, method="silent")
    pm.testing.check_method("silent")


def test_no_method_of_a_paper_is_left_out_of_the_catalogue() -> None:
    modules = [
        importlib.import_module(f"proxymetric.papers.{info.name}") for info in pkgutil.iter_modules(papers.__path__)
    ]
    rows = {name for module in modules for name, value in vars(module).items() if hasattr(value, "about")}
    assert rows == {method.__name__ for method in (CATALOGUE | CLOSED_FORMS).values()}
