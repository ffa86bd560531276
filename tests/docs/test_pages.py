"""Pages of docs/ and files of studies/: their code runs, and the recipes, studies and rows that they name exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from proxymetric.system import _torchvision  # noqa: F401  (timm needs it where torchvision's compiled part is missing)

ROOT = Path(__file__).resolve().parent.parent.parent
STUDIES = sorted((ROOT / "studies").glob("*.toml"))
DEVIATIONS = (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8")
WEIGHTS = (ROOT / "docs" / "how-to" / "weights.md").read_text(encoding="utf-8")


def test_every_deviation_has_one_complete_row():
    rows = [line for line in DEVIATIONS.splitlines() if re.match(r"\| [IVCD]\d", line)]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    numbers = {"I": 10, "V": 6, "C": 6, "D": 14}
    assert [row[0] for row in cells] == [f"{letter}{n}" for letter in numbers for n in range(1, numbers[letter] + 1)]
    assert all(len(row) == 5 and all(row) for row in cells)


def test_the_studies_and_recipes_of_the_page_exist():
    for name in set(re.findall(r"`(studies/[\w-]+\.toml)`", DEVIATIONS)):
        assert (ROOT / name).is_file(), name
    for name in set(re.findall(r"`((?:vit-s-160|cub|cub-160)/[\w*-]+)`", DEVIATIONS)):
        pattern = f"{name}.toml" if name.startswith("cub") else f"cub/{name}.toml"
        assert list((ROOT / "recipes").glob(pattern)), name


def test_the_code_of_the_page_on_weights_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", WEIGHTS, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})
    assert capsys.readouterr().out == "3x3\n"


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_names_recipes_and_baselines_that_exist(path):
    study = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in study["rows"]}
    assert len(rows) == len(study["rows"])
    for row in rows.values():
        for data in study["data"]:
            assert "recipe" not in row or (ROOT / row["recipe"].replace("{data}", data)).is_file()
        if "claim" in row or "baseline" in row:
            assert row["baseline"] in rows


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_claim_is_at_most_a_digit_off_the_printed_difference(path):
    # A paper names its own baseline; if the figure of that row is from another source, the two may differ more.
    elsewhere = {
        ("vcpa", "proxy-anchor"),
        ("mpa", "proxy-anchor"),
        ("mpa-ap", "proxy-anchor"),
        ("proxy-isa", "proxy-anchor"),
    }
    study = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in study["rows"]}
    for row in rows.values():
        if (row["name"], row.get("baseline")) in elsewhere:
            continue
        for data, claims in row.get("claim", {}).items():
            for metric, claim in claims.items():
                base = rows[row["baseline"]].get("paper", {}).get(data, {}).get(metric)
                if base is not None:
                    assert claim == pytest.approx(row["paper"][data][metric] - base, abs=0.051), (row["name"], metric)
