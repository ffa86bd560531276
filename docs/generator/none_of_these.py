"""Tables of "none of these": false-accept rates asked and got."""

from __future__ import annotations

from generator.scores import BENCHMARKS, paragraph, read, table


def none_of_these_table() -> str:
    """The recorded run of benchmarks/none_of_these.py on the test classes."""
    study = read(BENCHMARKS / "none-of-these.json")
    test, run = study["test"], study["run"]
    rows = []
    for rule, rates in test["rules"].items():
        for rate, shares in rates.items():
            got, named = shares["false accepts"], shares["true accepts"]
            rows.append([rule, f"{100 * float(rate):g} %", _span(got), _draws(got), _span(named)])
    classes, images = test["in the index"]
    training = "with a frozen backbone" if run["frozen"] else "with the whole backbone"
    text = paragraph(
        f"{run['data']}, the {test['classes']} test classes ({test['images']:,} images). The model is "
        f"`{run['backbone']}` at {run['size']} pixels, trained {training} by `{run['method']}` on half of the training "
        f"classes; its R@1 on "
        f"the test classes is {100 * test['scores']['R@1']:.1f} %. {study['draws']} draws of {classes} classes with "
        f"{images:,} images in the index; ranges in brackets are 95 % intervals over classes, of false accepts also "
        f"the lowest and the highest draw."
    )
    columns = ["rule", "asked", "false accepts, %", "lowest to highest draw", "named rightly, %"]
    return f"{text}\n\n{table(columns, rows)}"


def choice_table() -> str:
    """How the score was chosen: true accepts on the held-out training classes."""
    study = read(BENCHMARKS / "none-of-these.json")
    rows = [
        [name.replace("1 centres", "1 centre"), *(f"{100 * value:.1f}" for value in values)]
        for name, values in study["choice"].items()
    ]
    return table(["score", "at 10 %", "at 1 %", "at 0.1 %"], rows)


def _span(share: dict) -> str:
    low, high = share["interval"]
    digits = 1 if share["value"] >= 0.02 else 2
    return f"{100 * share['value']:.{digits}f} ({100 * low:.{digits}f} to {100 * high:.{digits}f})"


def _draws(share: dict) -> str:
    return f"{100 * min(share['draws']):.2f} to {100 * max(share['draws']):.2f}"
