"""The code, commands, flags and files on the pages of README.md and docs/ are right."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer

from proxymetric.cli import app
from proxymetric.system import _torchvision  # noqa: F401  (timm needs it where torchvision's compiled part is missing)
from terminal import TINY, proxymetric

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIAL = ROOT / "docs" / "tutorials" / "photos.md"
NOTEBOOK = TUTORIAL.with_suffix(".ipynb")
MAX_README_BYTES = 9 * 1024
VERBS = typer.main.get_command(app).commands


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(language: str, text: str) -> list[str]:
    """The code blocks of a language, without those that follow a line `<!-- skip: reason -->`."""
    fence = re.compile(rf"^(<!-- skip: [^\n]+ -->\n)?^```({language})\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [code for skip, _, code in fence.findall(text) if not skip]


def commands(text: str) -> list[list[str]]:
    """Return the words of every `proxymetric VERB ...` in a shell text; continued lines are joined."""
    lines = text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[line.index("proxymetric") + 1 :] for line in words if "proxymetric" in line]


def commands_of(page: Path) -> list[list[str]]:
    """Every command of a page, in blocks (skipped ones too) and in sentences."""
    text = page.read_text(encoding="utf-8")
    shell = "\n".join(re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    spans = re.findall(r"`(proxymetric [a-z][^`]*)`", text)
    return [words for code in (shell, *spans) for words in commands(code.replace("\n", " ") if code in spans else code)]


def test_blocks_are_found_and_skipped():
    text = "a\n```python\nx = 1\n```\n<!-- skip: needs photos -->\n```python\ny\n```\n```bash\nls\n```\n"
    assert blocks("python", text) == ["x = 1\n"]
    assert blocks("bash", text) == ["ls\n"]
    assert blocks("python|bash", text) == ["x = 1\n", "ls\n"]


def test_the_readme_is_short():
    assert (ROOT / "README.md").stat().st_size <= MAX_README_BYTES


@pytest.fixture(scope="module")
def demo(photos, tmp_path_factory) -> Path:
    """A folder with a tiny run in the place of that of `make demo`."""
    folder = tmp_path_factory.mktemp("demo")
    size = ("--size", 32, "--set", "view.resize=32", "--no-report")
    answer = proxymetric("train", "--data", photos, *TINY, *size, "--out", folder / "runs" / "demo")
    assert answer.code == 0, answer
    return folder


WITH_PYTHON = [page for page in PAGES if page != TUTORIAL and blocks("python", page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_the_python_of_a_page_runs(page, demo, tmp_path, monkeypatch):
    """The code runs in one namespace for each page, in a folder with the run of `make demo`."""
    text = page.read_text(encoding="utf-8")
    if "runs/demo" in text:
        shutil.copytree(demo / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    for number, code in enumerate(blocks("python", text), 1):
        exec(compile(code, f"{name(page)}, python block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=name)
def test_the_commands_of_a_page_exist(page):
    for words in commands_of(page):
        size = 2 if " ".join(words[:2]) in VERBS else 1
        verb, rest = " ".join(words[:size]), words[size:]
        assert verb in VERBS, verb
        known = {flag for option in VERBS[verb].params for flag in (*option.opts, *option.secondary_opts)}
        for flag in (word.split("=")[0] for word in rest if word.startswith("-")):
            assert flag in known, f"proxymetric {verb} has no {flag}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_flags_and_files_of_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    known = {
        flag for verb in VERBS.values() for option in verb.params for flag in (*option.opts, *option.secondary_opts)
    }
    assert set(re.findall(r"`(--[a-z][a-z-]*)", text)) <= known | {"--help"}
    for file in set(re.findall(r"(?:recipes|studies|src|benchmarks|examples)/[\w/.+-]+\.(?:toml|py)\b", text)):
        assert (ROOT / file).is_file(), file
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text):
        target = (page.parent / link).resolve()
        generated = ("methods", "studies", "reference", "images")
        outside = page.name != "README.md" and target.relative_to(ROOT / "docs").parts[0] in generated
        assert target.exists() or outside or target.name in ("contributing.md", "examples.md", "changelog.md"), link


@pytest.mark.slow
def test_the_photo_tutorial_runs(tmp_path, monkeypatch, capsys):
    """All of its steps in order: its Python, and its commands as a person types them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    for code in blocks("python|bash", TUTORIAL.read_text(encoding="utf-8")):
        if code.startswith("proxymetric"):
            for words in commands(code):
                answer = proxymetric(*words)
                assert answer.code == 0, answer
        else:
            exec(compile(code, name(TUTORIAL), "exec"), namespace)
    result = json.loads(Path("runs/photos/result.json").read_text())
    assert result["rows"]["trained encoder"]["MAP@R"] > result["rows"]["raw pixels"]["MAP@R"]
    assert len(capsys.readouterr().out.splitlines()) == 5, "five hits"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """Its code cells run in order; it is stored without outputs."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("proxymetric.runs.session.draw_report", lambda *args, **kwargs: None)
    namespace: dict[str, object] = {"__name__": "notebook"}
    for number, cell in enumerate(cells, 1):
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), namespace)
    assert namespace["scores"]["R@1"] > 0.5
    assert namespace["strip"].size == (384, 64)
