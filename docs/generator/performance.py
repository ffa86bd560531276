"""Tables of the recorded benchmarks: metrics, steps, and losses over many classes."""

from __future__ import annotations

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
