"""Names with markup, control characters or bytes that are not text are shown literally."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from proxymetric.cli.studying import running_table
from proxymetric.cli.tables import hits_table
from proxymetric.system.tables import TextTable, score_table
from proxymetric.system.terminal import Terminal
from proxymetric.system.text import visible
from proxymetric.system.watcher import Tick
from terminal import Answer, proxymetric, refused, train

NAMES = ("cat[final].png", "[red]x.png", "a[/b].png", ":cat:.png", "a[")


@pytest.fixture(scope="module")
def data(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos with markup and control characters in their names."""
    root = tmp_path_factory.mktemp("nasty") / "data[bold]"
    for number, folder in enumerate(sorted(photos.iterdir())):
        copy = root / ("a[" if number == 0 else "[red]b" if number == 1 else f"c{number}\x1b[31m")
        shutil.copytree(folder, copy)
        for file, name in zip(sorted(copy.iterdir()), ("cat[final].png", "[red]x.png", ":cat:.png", "new\nline.png")):
            file.rename(copy / name)
    return root


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run[v2]"
    answer = train(data, folder)
    assert answer.code == 0, answer
    assert f"report: {folder / 'report.html'}" in answer.out
    assert "\x1b" not in answer.out
    return folder


def lines(answer: Answer) -> list[list[str]]:
    assert answer.code == 0, answer
    return [line.split("\t") for line in answer.out.splitlines()]


def drawn(table: TextTable) -> str:
    screen = io.StringIO()
    Console(file=screen, force_terminal=True, width=120, color_system=None).print(table)
    return screen.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_markup_is_text_in_every_table(name):
    tables = (
        score_table(name, {name: {"R@1": 0.5}}),
        hits_table(name, [(name, name, 0.5)]),
        running_table([{"run": name, "kind": "train", "seconds": 1.0}], name),
    )
    for table, times in zip(tables, (2, 3, 2)):
        assert drawn(table).count(name) == times


@pytest.mark.parametrize("name", NAMES)
def test_markup_is_text_in_messages_and_progress(name):
    screen = io.StringIO()
    terminal = Terminal(Console(file=screen, force_terminal=True, width=100))
    terminal.say(f"left out: {name}")
    terminal.work(f"embedding {name}", 1, 3)
    terminal.tick(Tick(1, 2, 1, 1, 0.5, 10.0, 1.0))
    terminal.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert f"left out: {name}" in shown
    assert f"embedding {name}" in shown


def test_control_characters_are_escaped(tmp_path):
    screen = io.StringIO()
    terminal = Terminal(Console(file=screen, width=100))
    terminal.say("evil\x1b[2Jname\x9b\u202e.png\ntwo")
    assert screen.getvalue() == "evil\\x1b[2Jname\\x9b\\u202e.png\ntwo\n"
    assert drawn(score_table("", {"a\x1b]0;b\x07\n": {"R@1": 0.5}})).count("a\\x1b]0;b\\x07\\n") == 1
    missing = tmp_path / "no\x1b[31mrun"
    answer = proxymetric("evaluate", missing)
    refused(answer, "no\\x1b[31mrun")
    assert "\x1b" not in answer.err


def test_bytes_that_are_no_text_are_shown():
    name = os.fsdecode(b"caf\xe9.png")
    assert visible(name) == "caf\\xe9.png"
    screen = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    Terminal(Console(file=screen, width=100)).say(name)
    screen.flush()
    assert screen.buffer.getvalue() == b"caf\\xe9.png\n"


def test_words_of_other_languages_stay():
    for name in ("Käse.png", "猫.png", "👩‍🌾.png", "مرحبا"):
        assert visible(name) == name


def test_query_prints_plain_lines(data, run):
    asked = data / "a[" / "cat[final].png"
    answer = proxymetric("search", run, asked, "--in", data, "-k", 79)
    rows = lines(answer)
    assert len(rows) == 79
    assert all(len(row) == 5 for row in rows)
    assert {row[0] for row in rows} == {str(asked)}
    assert [row[1] for row in rows] == [str(place) for place in range(1, 80)]
    files = {row[4]: row[3] for row in rows}
    assert files[str(data / "[red]b" / "[red]x.png")] == "[red]b"
    assert files[str(data / "a[" / ":cat:.png")] == "a["
    assert files[str(data / "[red]b" / "new\\nline.png").replace("\\\\n", "\\n")] == "[red]b"
    assert "\x1b" not in answer.out
    assert [row[3] for row in rows if row[4].endswith("c2\\x1b[31m/:cat:.png")] == ["c2\\x1b[31m"]


def test_query_prints_json(data, run, tmp_path):
    index = tmp_path / "x.safetensors"
    assert proxymetric("embed", run, data, "--out", index).code == 0
    asked = [data / "a[" / "cat[final].png", data / "[red]b" / "new\nline.png"]
    answer = proxymetric("search", run, *asked, "--in", index, "-k", 2, "--json")
    assert answer.code == 0, answer
    content = json.loads(answer.out)
    assert [each["query"] for each in content] == [str(file) for file in asked]
    for each in content:
        assert [hit["rank"] for hit in each["results"]] == [1, 2]
        assert all(Path(hit["file"]).is_file() for hit in each["results"])
        assert all(Path(hit["file"]).parent.name == hit["class"] for hit in each["results"])
    plain = lines(proxymetric("search", run, asked[0], "--in", data, "-k", 2))
    assert [row[2] for row in plain] == [f"{hit['similarity']:.3f}" for hit in content[0]["results"]]


def test_query_says_the_order_of_its_arguments(data, run):
    image = data / "a[" / "cat[final].png"
    refused(proxymetric("search", run, data, "--in", image), "IMAGE: got", "which is a folder; expected image files")
    refused(proxymetric("search", run, image, "--in", image), "which is an image", "search RUN IMAGE --in IMAGES")


def test_long_names_are_not_wrapped_where_there_is_no_terminal(run, data, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    answer = proxymetric("methods")
    assert re.search(r"^proxy-anchor +Kim et al. 2020 +the one to start with", answer.out, re.MULTILINE)
    assert not re.search("[─━│┃]", answer.out)
    scores = proxymetric("evaluate", run, "--metrics", "R@1", "--no-report")
    assert re.search(r"^R@1 +\d+\.\d +\d+\.\d +[-+]\d+\.\d$", scores.out, re.MULTILINE), scores.out


def test_the_report_shows_the_names(run):
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "\x1b" not in page
    assert 'title="' in page
    assert re.search(r'title="[^"]*/(cat\[final\]|\[red\]x|:cat:|new\\nline|\d)\.png"', page), "file names of pictures"
