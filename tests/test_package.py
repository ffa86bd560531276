"""The built wheel works without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel: the files that an installation puts next to the packages it depends on."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(folder / built.stdout.split()[-1]) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def installed(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the unpacked wheel, in a folder elsewhere."""
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


def test_recipes_are_shipped_and_found_by_name(site, tmp_path):
    script = "import proxymetric, proxymetric.runs.recipe as r; print(proxymetric.__file__); print(*r.names())"
    answer = installed(site, tmp_path, "-c", script)
    assert answer.returncode == 0, answer.stderr
    where, names = answer.stdout.splitlines()
    assert Path(where).parent == site / "proxymetric"
    files = {file.relative_to(ROOT / "recipes").with_suffix("").as_posix() for file in ROOT.glob("recipes/**/*.toml")}
    assert set(names.split()) == files


@pytest.mark.slow
def test_a_shipped_recipe_trains_elsewhere(site, tmp_path):
    words = ("--recipe", "glyphs/demo", "--data", "glyphs:8", "--epochs", "1", "--no-report", "--device", "cpu")
    answer = installed(site, tmp_path, "-m", "proxymetric", "train", *words, "--out", "run")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert (tmp_path / "run" / "result.json").is_file()
    wrong = installed(site, tmp_path, "-m", "proxymetric", "train", "--recipe", "glyphs/demmo")
    assert wrong.returncode == 1
    assert "did you mean 'glyphs/demo'?" in wrong.stderr
