"""Tables of search: engines by size, the exact engine beside NumPy and faiss, the service under load, the map."""

from __future__ import annotations

from typing import Any

from generator.scores import BENCHMARKS, paragraph, read, table

RECORD, SERVICE, FRAMES = (f"{name}-cpu.json" for name in ("search", "service", "map-frames"))
SIZES = ("small", "large")
PARTS = {"1 at a time": "one query", "64 at a time": "64 queries"}


def engines_table(size: str) -> str:
    """One size of benchmarks/search.py: what each engine costs and finds, with one thread."""
    study = read(BENCHMARKS / RECORD)
    found = study["sizes"].get(size)
    if not found or not found["engines"]:
        return f"No results of the size `{size}` are stored in `benchmarks/results/{RECORD}`."
    rows = []
    for name, engine in found["engines"].items():
        rates = [_rate(engine[part]["queries_per_second"]) for part in PARTS]
        # 64 at a time has the most queries, so that its recall has the smallest error.
        recall = f"{engine['64 at a time']['recall@10']:.3f}"
        sizes = [f"{engine[kind] / 1e6:,.0f} MB" for kind in ("bytes", "memory_bytes")]
        rows.append([name, _seconds(engine["build_seconds"]), *sizes, *rates, recall, _effort(engine["chosen"])])
    facts = found["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    text = (
        f"{found['vectors']:,} vectors of {found['classes']:,} classes, {study['dim']} dimensions, float32. "
        f"{facts['processor']} ({facts['architecture']}), {facts['cores']} cores; searches use one thread. {versions}."
    )
    columns = ["engine", "build", "bytes", "added memory", *PARTS.values(), "recall@10", "effort"]
    parts = [paragraph(text), table(columns, rows)]
    if "exact" in found["engines"]:
        parts.append(paragraph(_fastest(found["engines"])))
    return "\n\n".join(parts)


def _fastest(engines: dict[str, Any]) -> str:
    """The fastest of our engines for one query and for 64, and what it finds."""
    ours = {name: engine for name, engine in engines.items() if name not in ("NumPy", "faiss flat")}
    sentences = []
    for part, words in PARTS.items():
        name = max(ours, key=lambda name: ours[name][part]["queries_per_second"])
        recall = ours[name]["64 at a time"]["recall@10"]
        sentences.append(f"{words}: **{name}** (recall {recall:.3f})")
    return f"The fastest of the {len(ours)} engines of this package that were measured: {'; '.join(sentences)}."


def _rate(value: float) -> str:
    return f"{value:,.0f}/s" if value >= 10 else f"{value:.1f}/s"


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.1f} s" if value >= 0.05 else "-"


def _effort(chosen: dict[str, Any]) -> str:
    """How much of its structure an approximate engine looks at, as it chose by itself."""
    if "effort" not in chosen:
        return "all vectors"
    lists = chosen.get("lists")
    return f"{chosen['effort']:,} of {lists:,} lists" if lists else f"{chosen['effort']:,} candidates"


def ratios_table() -> str:
    """The exact engine beside NumPy and faiss flat, for each size, with one thread and with all cores."""
    study = read(BENCHMARKS / RECORD)
    rows = []
    for size in SIZES:
        found = study["sizes"].get(size, {})
        for part, threads in ((found, 1), (found.get("all cores", {}), found.get("all cores", {}).get("threads", 0))):
            if "ratios" in part:
                rows += _ratio_rows(part, found["vectors"], threads)
    if not rows:
        return f"No ratios are stored in `benchmarks/results/{RECORD}`."
    columns = ["vectors", "threads", "queries", "exact", "NumPy", "faiss flat", "of the faster", "each process"]
    return table([*columns, "exact reads"], rows)


def _ratio_rows(part: dict[str, Any], vectors: int, threads: int) -> list[list[str]]:
    rows = []
    clock = "cpu_seconds" if threads == 1 else "wall_seconds"
    for batch, words in PARTS.items():
        engines = part["engines"]
        times = [f"{1000 * engines[name][batch][clock]:,.1f} ms" for name in ("exact", "NumPy", "faiss flat")]
        each = sorted(process[batch] for process in part["ratios of processes"])
        # Many queries share one pass over the vectors, so their rate says nothing about memory.
        rate = engines["exact"]["bytes"] / engines["exact"][batch]["wall_seconds"] / 1e9
        reads = f"{rate:.1f} GB/s" if batch.startswith("1 ") else ""
        spread = " ".join(f"{ratio:.3f}" for ratio in each)
        rows.append([f"{vectors:,}", str(threads), words, *times, f"{part['ratios'][batch]:.3f}", spread, reads])
    return rows


def load_table() -> str:
    """The load of benchmarks/service.py: clients that search with photos without a pause."""
    study = read(BENCHMARKS / SERVICE)
    load = study.get("load")
    if load is None:
        return f"No load is stored in `benchmarks/results/{SERVICE}`."
    rows = []
    for name, case in load["cases"].items():
        statuses = ", ".join(f"{count:,} x {status}" for status, count in sorted(case["statuses"].items()))
        memory = " to ".join(f"{case['memory_mb'][part]:,.1f}" for part in ("first_quarter", "last_quarter"))
        times = [f"{case[kind] / 1000:.2f} s" for kind in ("p50_ms", "p99_ms")]
        rate = f"{case['searches_per_second']:.1f}/s"
        rows.append([name, f"{case['seconds']:,.0f} s", statuses, rate, *times, f"{memory} MB"])
    measured = load.get("measured", {}).get("commit")
    when = f"Commit {measured[:7]}." if measured else "The record does not say which commit was measured."
    clients = next(iter(load["cases"].values()))["clients"]
    facts = study["machine"]
    text = (
        f"{clients} clients, {load['photos']} JPEGs of {load['mean_bytes'] / 1000:.0f} kB on average. "
        f"{facts['architecture']}, {facts['cores']} cores, which the clients use too. {when}"
    )
    columns = ["service", "time", "answers", "searches", "p50", "p99", "memory, first to last quarter"]
    return f"{paragraph(text)}\n\n{table(columns, rows)}"


def frames_table() -> str:
    """The recorded run of benchmarks/map_frames.py: script time of the map in Chromium."""
    study = read(BENCHMARKS / FRAMES)
    rows = []
    names = {"frames": "a frame", "movements": "a movement of the mouse, with all that follows"}
    for kind, moves in study["script_time"].items():
        for move, found in moves.items():
            if move != "all" and found["count"] > 1:
                times = [f"{found[part]:.1f} ms" for part in ("p50_ms", "p95_ms", "max_ms")]
                rows.append([move, names[kind], str(found["count"]), *times])
    facts = study["machine"]
    text = (
        f"{study['points']:,} points and {study['proxies']} Gaussian proxies, Chromium {facts['chromium']}, "
        f"{facts['graphics']} graphics, {facts['architecture']}. A frame should need less than "
        f"{study['limit_ms']:g} ms of script at the 95th percentile."
    )
    return f"{paragraph(text)}\n\n{table(['what', 'script time of', 'count', 'p50', 'p95', 'highest'], rows)}"
