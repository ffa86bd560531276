"""The table of benchmarks/small_vectors.py: bytes of a vector and what they cost."""

from __future__ import annotations

from generator.scores import BENCHMARKS, read, table

SHOWN = ("float32", "int8", "binary, bits alone", "binary")
"""the kinds of numbers that an index can store, and the bits of which `binary` makes its first choice"""


def small_vectors_table() -> str:
    """The recorded run on the test half of CUB: scores by dimensions and numbers."""
    records = read(BENCHMARKS / "small-vectors-cub-test-half.json")["records"]
    rows = []
    for record in records:
        if record["vectors"] in SHOWN:
            scores = f"{100 * record['scores']['R@1']:.1f}", f"{100 * record['scores']['MAP@R']:.2f}"
            recall = f"{100 * record['recall@10']:.1f}"
            rows.append([str(record["dim"]), record["vectors"], f"{record['bytes']:,}", *scores, recall])
    return table(["dimensions", "numbers", "bytes", "R@1, %", "MAP@R, %", "recall@10 of float32, %"], rows)
