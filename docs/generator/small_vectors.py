"""The tables of small vectors: bytes of a vector and what they cost, by a benchmark and by a study."""

from __future__ import annotations

from generator.scores import BENCHMARKS, RESULTS, ROOT, read, table

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


def matryoshka_table() -> str:
    """The study of nested training: vectors that are cut beside those of runs that were trained at that dimension."""
    from proxymetric.studies import load_study
    from proxymetric.studies.inference import paired, student
    from proxymetric.studies.results import stored_results
    from proxymetric.studies.scores import Results
    from proxymetric.studies.tables import mean_text

    study = load_study(ROOT / "studies" / "cub-matryoshka.toml")
    results = Results(study, stored_results(study, RESULTS / study.name))
    by_row = {cell.row: cell for cell in study.cells()}
    nested = by_row["nested"]
    scores = {metric: results.sizes(nested, metric) for metric in study.metrics}
    rows = []
    for key in sorted(scores["MAP@R"], key=lambda key: (key[0], -key[2])):
        dim, kind, size = key
        line = [str(dim), kind, f"{size:,}"]
        for metric, of_nested in scores.items():
            cut, trained = of_nested[key], results.sizes(by_row[f"dim-{dim}"], metric)[key]
            line += [mean_text(student(list(values.values()))) for values in (cut, trained)]
            line.append(mean_text(paired(cut, trained), "+"))
        rows.append(line)
    seeds = len(next(iter(scores["MAP@R"].values())))
    columns = [f"{metric}, {side}" for metric in scores for side in ("cut", "trained at that dimension", "difference")]
    note = f"Mean over {seeds} seeds in per cent ± half the 95 % Student interval; differences are paired by seed."
    return f"{table(['dimensions', 'numbers', 'bytes', *columns], rows)}\n\n{note}"
