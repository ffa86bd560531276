"""The table of the main memory of divided proxies."""

from __future__ import annotations

from generator.scores import BENCHMARKS, paragraph, read, table

STAGES = {
    "all proxies, then a part": "`pm.method(...).shard(rank, size)`",
    "a part alone": "`pm.method(..., shard=(rank, size))`, as `train.shard` does",
    "a checkpoint": "a checkpoint is written",
}
"""stage of the benchmark -> what happens in it"""


def divided_proxies_table() -> str:
    """The recorded run of benchmarks/divided_proxies.py."""
    study = read(BENCHMARKS / "divided-proxies.json")
    first, *others = study["processes, in tables"]
    rows = [[text, _peak(first[stage]), _peak(max((each[stage] for each in others), key=lambda peak: peak or 0.0))]
            for stage, text in STAGES.items()]  # fmt: skip
    text = paragraph(
        f"{1 + len(others)} processes on a CPU divide {study['classes']:,} proxies of {study['dim']} numbers. The "
        "figures are the peak of the main memory of a process above what it held before, as a multiple of the memory "
        f"of all proxies, {study['table_mb']:,.0f} MB. The checkpoint has {first['size of the checkpoint']:.1f} times "
        "this size, because Adam keeps two numbers for each number of a proxy."
    )
    return f"{text}\n\n{table(['', 'first process', 'another process'], rows)}"


def _peak(tables: float | None) -> str:
    return "0" if tables is None else f"{tables:.2f}"
