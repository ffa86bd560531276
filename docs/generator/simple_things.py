"""Tables of `train --frozen` beside simple things, and of the settings that it could have by default."""

from __future__ import annotations

from generator.scores import BENCHMARKS, paragraph, read, table

ROWS_FILE = "simple-things"


def simple_things_table() -> str:
    """The recorded run of benchmarks/simple_things.py: the scores of all rows on the unseen classes."""
    record = read(BENCHMARKS / f"{ROWS_FILE}.json")
    cells = record["cells"]
    names = dict.fromkeys(name for cell in cells.values() for name in cell["rows"])
    lines = []
    for name in names:
        shown = [cell["rows"].get(name) for cell in cells.values()]
        lines.append(
            [_title(name), *("" if row is None else f"{row['R@1']:.1f} / {row['MAP@R']:.1f}" for row in shown)]
        )
    lines.append(["chosen by held-out classes", *(_counted(cell["chosen"]) for cell in cells.values())])
    sets = ", ".join(
        f"{name} ({about['classes']} classes, {about['photographs']:,} photographs)"
        for name, about in record["sets"].items()
    )
    text = paragraph(
        f"R@1 / MAP@R in per cent on unseen classes, mean over {_splits(record)} splits: {sets}. Half of the classes "
        "are known. The last row names what a careful person would have taken in each split: the simple row with the "
        "best MAP@R on folds of the known classes."
    )
    columns = ["row", *(_short(name) for name in cells)]
    return f"{text}\n\n{table(columns, lines)}"


def simple_things_verdict() -> str:
    """The difference of each row to the chosen one, with its interval over classes."""
    found = read(BENCHMARKS / f"{ROWS_FILE}.json")["verdict"]
    sets = list(next(iter(found.values())))
    lines = [
        [_title(row), *(_difference(parts[name]["MAP@R"]) for name in sets), _difference(parts["all sets"]["R@1"])]
        for row, parts in found.items()
    ]
    return table(["less the chosen row", *(f"MAP@R, {name}" for name in sets), "R@1, all sets"], lines)


def frozen_defaults_table() -> str:
    """The candidates that were measured in every split: their scores on the folds and on the unseen classes."""
    return _settings_table("frozen-defaults", differences=True)


def screening_table() -> str:
    """All candidates, in one split."""
    return _settings_table("frozen-defaults-screening")


def closed_forms_table() -> str:
    """Rules that choose among the closed forms on four folds."""
    return _settings_table("frozen-defaults-folds")


def few_classes_table() -> str:
    """What two rules lose when few held-out classes choose among the closed forms."""
    cells = read(BENCHMARKS / "frozen-defaults-folds.json")["cells"]
    found = next(iter(cells.values()))["few classes"]
    lines = [
        [count, rule, *(f"{cell['few classes'][rule][count]:.1f}" for cell in cells.values())]
        for count in next(iter(found.values()))
        for rule in found
    ]
    return table(["held-out classes", "taken", *(_short(name) for name in cells)], lines)


def _settings_table(name: str, differences: bool = False) -> str:
    record = read(BENCHMARKS / f"{name}.json")
    cells = record["cells"]
    others = list(record["differences"]["unseen"]) if differences else []
    lines = []
    for candidate in next(iter(cells.values()))["rows"]:
        if candidate.startswith(("simplest", "best")) and name.endswith("screening"):
            continue  # rules of a single split say little
        shown = [cell["rows"][candidate] for cell in cells.values()]
        scores = [f"{row['held-out']['MAP@R']:.1f}, {row['unseen']['MAP@R']:.1f}" for row in shown]
        found = [record["differences"]["unseen"][other].get(candidate) for other in others]
        lines.append([candidate, *scores, *("" if each is None else _difference(each["MAP@R"]) for each in found)])
    return table(["candidate", *(_short(cell) for cell in cells), *others], lines)


def _splits(record: dict) -> str:
    counts = {name: cell["splits"] for name, cell in record["cells"].items()}
    fewer = [f"{_short(name)}: {count}" for name, count in counts.items() if count < record["splits"]]
    return str(record["splits"]) + (f" ({'; '.join(fewer)})" if fewer else "")


def _title(name: str) -> str:
    return f"`{name}`" if name.startswith("train") else name


def _short(name: str) -> str:
    data, _, backbone = name.partition(", ")
    return f"{data}, {'ViT-S' if backbone.startswith('vit_small') else backbone.replace('resnet', 'ResNet-')}"


def _counted(names: list[str]) -> str:
    return ", ".join(
        name if names.count(name) == 1 else f"{name} ({names.count(name)})" for name in dict.fromkeys(names)
    )


def _difference(found: dict) -> str:
    low, high = found["interval"]
    return f"{found['value']:+.1f} ({low:.1f} to {high:.1f})"
