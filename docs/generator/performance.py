"""Tables of the recorded benchmarks: metrics, steps, losses over many classes, the peer, and start-up."""

from __future__ import annotations

import re

from generator.scores import BENCHMARKS, paragraph, read, table


def step_table() -> str:
    """The recorded runs of benchmarks/step.py: the time of a step of each method relative to Proxy-Anchor."""
    rows = []
    for kind in ("cuda", "cpu"):
        study = read(BENCHMARKS / f"step-{kind}.json")
        device = study["machine"].get("gpu") or f"CPU, {study['machine']['threads']} thread"
        for setting, part in study["settings"].items():
            for method, side in part["sides"].items():
                ratio = side.get("times proxy-anchor")
                if ratio is None:
                    continue
                low, high = side["times proxy-anchor, lowest and highest round"]
                target = study["targets"].get(f"{method} times proxy-anchor") if kind == "cuda" else None
                ratios = f"{ratio:.2f} ({low:.2f} to {high:.2f})"
                rows.append([device, setting, f"`{method}`", ratios, str(target or "")])
    columns = ["machine", "setting", "method", "times Proxy-Anchor's step (lowest and highest round)", "expected"]
    return table(columns, rows)


def metrics_table() -> str:
    """The recorded runs of benchmarks/metrics.py: CPU time and extra memory of both libraries, and time on a GPU."""

    def cost(side: dict) -> str:
        return f"{side['cpu']:.1f} s CPU, {side['extra_mb']:,.0f} MB"

    rows = []
    for size in read(BENCHMARKS / "metrics-cpu.json")["cpu"].values():
        for threads in (1, 2):
            run = size[f"{threads} threads"]
            costs = [cost(run[side]) for side in ("proxymetric", "pytorch-metric-learning")]
            ratios = [f"{run['cpu_ratio']:.2f} x", f"{run['memory_ratio']:.2f} x"]
            rows.append([f"{size['points']:,}", f"CPU, threads: {threads}", *costs, *ratios])
    cuda = read(BENCHMARKS / "metrics-cuda.json")
    seconds = f"{cuda['cuda']['on the GPU']['seconds']:.2f} s"
    rows.append([f"{cuda['cuda']['points']:,}", cuda["machine"]["gpu"], seconds, "", "", ""])
    columns = ["points", "machine", "proxymetric", "pytorch-metric-learning, faiss", "time", "extra memory"]
    return table(columns, rows)


def losses_table() -> str:
    """The recorded run of benchmarks/losses.py on a CPU: forward and backward pass of a loss in both libraries."""
    rows = []
    for loss, sizes in read(BENCHMARKS / "losses-cpu.json")["losses"].items():
        for size, part in sizes.items():
            sides = part.get("sides", {})
            if "proxymetric" not in sides or "peer" not in sides:
                continue
            name = f"`{loss}`" + (f", {part['per_class']} a class" if part["per_class"] > 1 else "")
            costs = [
                f"{1000 * sides[side]['seconds']:,.0f} ms, {sides[side]['extra_mb']:,.0f} MB"
                for side in ("proxymetric", "peer")
            ]
            peer = part["of the peer's"]
            ratios = [f"{peer[kind]:.2f} x" for kind in ("time", "memory")]
            rows.append([name, f"{int(size.split()[0]):,}", *costs, *ratios])
    return table(["loss", "classes", "proxymetric", "pytorch-metric-learning", "time", "extra memory"], rows)


def rates_table() -> str:
    """The recorded run of benchmarks/losses_cuda.py: Proxy-Anchor over very many classes on one GPU."""
    study = read(BENCHMARKS / "losses-cuda.json")
    rows = []
    for batch, sizes in sorted(study["proxy-anchor"].items(), key=lambda item: int(item[0].split()[1])):
        for classes, sides in sorted(sizes.items(), key=lambda item: int(item[0].split()[0])):
            fused = sides["triton"]
            share = f"{100 * fused['of the matrix rate']:.0f} %"
            row = [batch.split()[1], f"{int(classes.split()[0]):,}"]
            row.append(f"{fused['ms']:,.1f} ms, {fused['tflops']:.0f} TFLOP/s ({share})")
            row.append(f"{fused['of proxies and gradient']:.2f} x")
            for side in ("chunked", "dense, compiled", "dense"):
                row.append(f"{sides[side]['ms']:,.1f} ms" if "ms" in sides[side] else "does not fit")
            rows.append(row)
    columns = ["batch", "classes", "fused", "memory, of proxies and gradient", "chunks in torch", "compiled formula"]
    ten = study["ten per class"]
    times = {
        name: " and ".join(f"{sides['triton']['ms']:.0f} ms" for sides in ten[name].values())
        for name in ("soft-triple", "mpa-ap")
    }
    text = (
        f"One large matrix product reaches {study['matrix_tflops']:.0f} TFLOP/s in the same run, which is 100 %. Ten "
        "proxies for each of 100,000 classes are a million rows: with 512 and 4,096 embeddings `soft-triple` takes "
        f"{times['soft-triple']}, `mpa-ap` {times['mpa-ap']}. A mask of all pairs of proxies, as other libraries "
        f"build it, would need {ten['mask of all pairs of proxies, GiB']:.0f} GiB."
    )
    softmax = _softmax(study["others"]["norm-softmax"])
    return "\n\n".join([table([*columns, "formula"], rows), paragraph(text), softmax])


def _softmax(by_batch: dict) -> str:
    """The cost of norm-softmax: with the default budget, with all similarities stored, and as a compiled formula."""
    sentences = []
    for batch, sizes in by_batch.items():
        for classes, sides in sizes.items():
            costs = {name: f"{side['ms']:.1f} ms in {side['extra_mb'] / 1000:.1f} GB" for name, side in sides.items()}
            sentences.append(
                f"With {batch.split()[1]} embeddings and {int(classes.split()[0]):,} classes, `norm-softmax` takes "
                f"{costs['triton']}; {costs['triton, kept']} if all similarities are kept; and "
                f"{costs['dense, compiled']} as a compiled formula."
            )
    return paragraph(" ".join(sentences))


def peer_table() -> str:
    """The recorded run of benchmarks/peer_cuda.py: every loss that both libraries have, on a GPU."""
    study = read(BENCHMARKS / "peer-cuda.json")
    facts = study["machine"]
    clock = max([each for each in study["clock_mhz_during"] if each] or [0])
    text = (
        f"{facts['gpu']}" + (f" at {clock:,} MHz" if clock else "") + f", driver {facts['driver']}, torch "
        f"{facts['versions']['torch']}, pytorch-metric-learning {facts['versions']['pytorch-metric-learning']}, "
        f"{study['dim']} dimensions, {study['rounds']} rounds; precision of float32 products: "
        f"{study['matmul_precision']}."
    )
    parts = [paragraph(text)]
    for dtype, cells in study["cells"].items():
        parts += [f"**{dtype}**, compared with pytorch-metric-learning:", *_peer_tables(cells, "of the peer's", "peer")]
        compiled = _peer_tables(cells, "of the compiled formula's", "compiled")
        if compiled:
            parts += [f"**{dtype}**, compared with the formula under `torch.compile`:", *compiled]
        both = _peer_tables(cells, "compiled, of the compiled formula's", "compiled")
        if both:
            parts += [f"**{dtype}**, both under `torch.compile`, criterion and formula:", *both]
    return "\n\n".join(parts)


def peer_cpu_table() -> str:
    """The part "pairs" of the recorded runs of benchmarks/losses.py: every loss that both libraries have, on CPUs."""
    parts = []
    for file in ("losses-cpu.json", "losses-arm.json"):
        study = read(BENCHMARKS / file).get("pairs") if (BENCHMARKS / file).is_file() else None
        if study is None:
            parts.append(f"No results are stored in `benchmarks/results/{file}`.")
            continue
        facts = study["machine"]
        name = f"{facts['processor']} ({facts['architecture']})"
        parts.append(f"### {name}\n\ntorch {facts['versions']['torch']}, {study['dim']} dimensions, float32.")
        for threads in (key for key in study if key.endswith(" threads")):
            name = f"{threads.split()[0]} thread" + ("" if threads.startswith("1 ") else "s")
            parts += [f"**{name}**:", *_peer_tables(study[threads], "of the peer's", "peer")]
    return "\n\n".join(parts)


MAX_SIZES = 6
"""columns of a table of the peer"""


def _peer_tables(cells: dict, against: str, side: str) -> list[str]:
    """Tables of losses with proxies (batch and classes) and of pair losses (batch)."""
    sizes = dict.fromkeys(
        size for by_size in cells.values() for size, found in by_size.items() if _peer_cell(found, against, side)
    )
    in_order = sorted(sizes, key=lambda size: [int(number) for number in re.findall(r"\d+", size)[::-1]])
    tables = []
    with_classes = [size for size in in_order if "C" in size]
    parts = [with_classes[start : start + MAX_SIZES] for start in range(0, len(with_classes), MAX_SIZES)]
    for part in (*parts, [size for size in in_order if "C" not in size]):
        rows = []
        for loss, by_size in cells.items():
            texts = [_peer_cell(by_size.get(size, {}), against, side) for size in part]
            if any(texts):
                rows.append([f"`{loss.partition(',')[0]}`{''.join(loss.partition(',')[1:])}", *texts])
        if rows:
            tables.append(
                table(["loss", *(re.sub(r"\d{4,}", lambda m: f"{int(m[0]):,}", size) for size in part)], rows)
            )
    return tables


def _peer_cell(cell: dict, against: str, side: str) -> str:
    """Time as a share of the other side's, the other side's milliseconds, and the share of its memory."""
    if against not in cell:
        return "does not fit" if "does not fit" in cell.get("skipped", "") and side == "peer" else ""
    memory = cell[against]["memory"]
    time = f"{cell[against]['time']['median']:.2f} ({cell[side]['ms']['median']:.1f} ms)"
    return time if memory is None else f"{time}, {memory:.2f}"


def start_up_table() -> str:
    """The recorded run of benchmarks/start_up.py: seconds of fresh processes."""
    study = read(BENCHMARKS / "start-up.json")
    rows = [
        [f"`{name}`", *(f"{found[kind]['median']:.2f} s" for kind in ("wall", "cpu"))]
        for name, found in study["seconds"].items()
    ]
    facts = study["machine"]
    text = f"{facts['processor']}, Python {facts['versions']['python']}, torch {facts['versions']['torch']}."
    parts = [text, table(["fresh process", "time", "CPU time"], rows)]
    if demo := study.get("demo"):
        steps, everything = demo["steps"], demo["all without the report"]
        low, high = steps["lowest and highest"]
        parts.append(
            paragraph(
                f"The demo, {demo['rounds']} times: its training steps take {steps['median']:.0f} s "
                f"({low:.0f} to {high:.0f}), everything but the report {everything['median']:.0f} s: "
                "it draws the characters, scores raw pixels and the untrained encoder, and evaluates while it trains."
            )
        )
    return "\n\n".join(parts)
