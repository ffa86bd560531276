"""Parts of the guides for users of other libraries: both scripts of benchmarks/moving/, and what they cost."""

from __future__ import annotations

from typing import Any

from generator.scores import BENCHMARKS, ROOT, paragraph, read, table

SCRIPTS = ROOT / "benchmarks" / "moving"
NAMES = {"pml": "pytorch-metric-learning", "oml": "open-metric-learning"}


def scripts(peer: str) -> str:
    """Both scripts of a pair; tests run the files, so the blocks are not run a second time."""
    parts = []
    runner = "tests/docs/test_moving.py" if peer == "pml" else "benchmarks/moving_in.py"
    for title, side in ((f"With {NAMES[peer]}", "theirs"), ("With proxymetric", "ours")):
        code = (SCRIPTS / f"{peer}_{side}.py").read_text(encoding="utf-8").split('"""\n', 1)[1].strip()
        parts.append(f"**{title}**\n\n<!-- skip: {runner} runs this file -->\n```python\n{code}\n```")
    return "\n\n".join(parts)


def costs(peer: str) -> str:
    """What both scripts of a pair cost in the recorded run, and how far their numbers agree."""
    study = read(BENCHMARKS / "moving-in-cpu.json")
    pair = study["pairs"].get(NAMES[peer])
    if pair is None:
        return f"No run with {NAMES[peer]} is recorded."
    sides = pair["sides"]
    metrics = list(sides["ours"]["scores"])
    rows = [
        [
            NAMES[peer] if name == "theirs" else "proxymetric",
            str(side["lines"]),
            f"{side['ms']['median']:.1f} ms ({side['ms']['lowest and highest'][0]:.1f} to "
            f"{side['ms']['lowest and highest'][1]:.1f})",
            f"{side['training_mb']['median']:,.0f} MB",
            f"{side['process_mb']['median']:,.0f} MB",
            *(f"{100 * side['scores'][metric]:.2f}" for metric in metrics),
        ]
        for name, side in sides.items()
    ]
    theirs = sides["theirs"]
    same = all(abs(theirs["scores"][name] - theirs["scores by proxymetric"][name]) < 5e-7 for name in metrics)
    stated = ", ".join(f"{name} {100 * theirs['scores by proxymetric'][name]:.2f}" for name in metrics)
    by_proxymetric = (
        f"proxymetric measures {stated} with the network of {NAMES[peer]}"
        f"{': the same, so that a difference between the rows is one of training, not of definitions' if same else ''}"
    )
    columns = ["", "lines", "a step (lowest and highest round)", "memory of training", "whole process"]
    ratio = pair["time of ours to theirs, by round"]
    low, high = ratio["lowest and highest"]
    before, after = (study["load"][moment][0] for moment in ("before", "after"))
    text = paragraph(
        f"{NAMES[peer]} {pair['version']}, torch {sides['theirs']['torch']} and {sides['ours']['torch']}, "
        f"{study['machine']['processor']}, one thread; {pair['rounds']} rounds of {pair['steps']} steps, in turns. The "
        "time of a step is CPU time and includes the network, which takes most of it: in the same round, proxymetric "
        f"takes {ratio['median']:.2f} times as long ({low:.2f} to {high:.2f} in single rounds). Other work "
        f"ran beside it: the load of the machine was {before:.1f} before and {after:.1f} after, on "
        f"{study['machine']['cores']} cores. {_differences(pair)} Scores in per cent, on classes that were not "
        f"trained; {by_proxymetric}."
    )
    return f"{text}\n\n{table([*columns, *metrics], rows)}"


def _differences(pair: dict[str, Any]) -> str:
    """How far the losses and the results of the two sides differ."""
    narrow, wide = pair["in 32 bits"], pair["in 64 bits"]
    return (
        "The largest relative difference between the losses of the two sides is "
        f"{narrow['first 10 losses']:.0e} in the first 10 steps and {narrow['losses']:.0e} in all: each step magnifies "
        f"the rounding of those before it. {narrow['queries that differ']} of {narrow['queries']:,} queries then have "
        "another number of right images among their first five results. Computed in 64 bits, the difference between "
        f"the losses is {wide['losses']:.0e}, and {wide['queries that differ']} queries differ."
    )
