"""Tables of tuned vision transformers: parameters, results, and the cost of a step, compared with VPTSP's paper."""

from __future__ import annotations

import statistics

from generator.scores import BENCHMARKS, RESULTS, groups, interval, paragraph, read, score, table

VIT_RESULTS = RESULTS / "vit-s-128"
TABLE_1 = (
    ("full fine-tuning", "proxy-anchor", "full", 30.2),
    ("linear probe", "proxy-anchor", "linear", 0.19),
    ("BitFit (B)", "proxy-anchor", "bitfit", 0.26),
    ("Adapter, 7 blocks of 256", "proxy-anchor", {"name": "adapter", "blocks": 7, "bottleneck": 256}, 1.57),
    ("Adapter+B, 1 block of 256", "proxy-anchor", {"name": "adapter+bitfit", "blocks": 1, "bottleneck": 256}, 0.46),
    ("LoRA, rank 8", "proxy-anchor", {"name": "lora", "rank": 8}, None),
    ("VPT, 12 blocks of 10", "proxy-anchor", {"name": "vpt", "prompts": 10}, 0.23),
    ("VPT+B, 12 blocks of 10", "proxy-anchor", {"name": "vpt+bitfit", "prompts": 10}, 0.30),
    ("VPTSP-M", "vptsp-m", {"name": "vpt", "prompts": 10}, 0.60),
    ("VPTSP-M+B", "vptsp-m", {"name": "vpt+bitfit", "prompts": 10}, 0.67),
    ("VPTSP-G", "vptsp-g", {"name": "vpt", "prompts": 10}, 1.48),
    ("VPTSP-G+B", "vptsp-g", {"name": "vpt+bitfit", "prompts": 10}, 1.56),
)
"""rows of VPTSP's Table 1: label, method and tuning here, and the millions of parameters that the paper prints"""


def parameters_table() -> str:
    """The trained parameters of each tuning of a ViT-S/16 (384-D, 100 classes), compared with VPTSP's Table 1."""
    from proxymetric.system import _torchvision  # noqa: F401
    import timm  # isort: skip

    rows = []
    classifier = timm.get_pretrained_cfg("vit_small_patch16_224.augreg_in21k").num_classes
    for label, method, tuning, paper in TABLE_1:
        parts, width = _count_trained(method, tuning)
        total = sum(parts.values())
        # The released code keeps and counts the bias of the backbone's classifier, although the classifier is not used.
        unused = classifier * (width + 1 if "backbone" in parts else 1 if "biases" in parts else 0)
        row = [label, "", f"{total / 1e6:.3f} M", f"{(total + unused) / 1e6:.3f} M" if unused else "", ""]
        if paper is not None:
            row[1] = f"{paper:.1f} M" if paper > 10 else f"{paper:.2f} M"
            row[4] = f"{100 * ((total + unused) / (1e6 * paper) - 1):+.1f} %"
        rows.append([*row, " + ".join(f"{part} {count:,}" for part, count in parts.items())])
    columns = ["tuning", "paper", "trained here", "with the unused classifier", "difference", "trained parts"]
    return table(columns, rows)


def _count_trained(method: str, tuning: str | dict) -> tuple[dict[str, int], int]:
    """How many parameters of each part of encoder and criterion are trained, and the width of the encoder's tokens."""
    import torch

    import proxymetric as pm
    from proxymetric.encoders import build, tuned_parameters

    with torch.device("meta"):  # shapes are enough to count
        encoder = build(
            "vit_small_patch16_224", dim=384, layer_norm=True, head_init="xavier", pretrained=False, tuning=tuning
        )
    criterion = pm.method(method, classes=100, dim=384)
    criterion.bind(encoder)
    return tuned_parameters(encoder) | criterion.parts(), encoder.width


TUNED = {
    "full": ("full fine-tuning", (85.5, 51.1), (86.7, 28.7)),
    "linear": ("linear probe", (84.9, 48.1), ()),
    "bitfit": ("BitFit", (85.7, 51.3), ()),
    "adapter": ("Adapter", (83.1, 46.4), ()),
    "lora": ("LoRA", (), ()),
    "vpt": ("VPT", (85.1, 51.2), (86.3,)),
    "vpt-bitfit": ("VPT+B", (85.7, 51.6), (86.3, 27.6)),
    "vptsp-m": ("VPTSP-M+B", (85.9, 51.8), (86.8, 28.7)),
    "vptsp-g": ("VPTSP-G+B", (86.6, 52.5), (87.7, 29.5)),
}
"""recipes of vit-s-128: the name in VPTSP's paper; its R@1 and MAP@R for CUB (Table 1) and for Cars (Tables 2 and 4)"""


def tuned_table() -> str:
    """The runs of results/vit-s-128/ compared with the paper: means over the seeds and 95 % Student intervals."""
    results, rows = groups(VIT_RESULTS), []
    for name, (label, *papers) in TUNED.items():
        row = [label]
        for data, paper in zip(("cub", "cars"), papers, strict=True):
            runs, baseline = results.get(f"{data}/{name}", {}), results.get(f"{data}/vpt-bitfit", {})
            count = "" if len(runs) == 3 else f" ({len(runs)} seeds)"
            row.append(", ".join(map(str, paper)))
            for metric in ("R@1", "MAP@R"):
                row.append(interval([score(run, metric) for run in runs.values()]) + count if runs else "")
            differences = [score(run, "R@1") - score(baseline[s], "R@1") for s, run in runs.items() if s in baseline]
            row.append("" if name == "vpt-bitfit" or not differences else interval(differences, sign="+"))
        rows.append(row)
    metrics = ["R@1", "MAP@R", "R@1 to VPT+B"]
    columns = ["tuning", "CUB, paper: R@1, MAP@R", *metrics, "Cars, paper: R@1, MAP@R", *metrics]
    return f"{table(columns, rows)}\n\n{_other_rates(results)}".strip()


def _other_rates(results: dict[str, dict[str, dict]]) -> str:
    """The score of the untrained encoder, and the effect of the proxies' learning rate."""
    names = [
        "cub/full", "cars/full", "cub/vptsp-m", "tried/cub/vptsp-m-proxy-rate-1e-3", "cars/vptsp-g",
        "tried/cars/vptsp-g-proxy-rate-1e-3",
    ]  # fmt: skip
    runs = [results.get(name, {}).get("0") for name in names]
    if None in runs:
        return ""
    untrained = [100 * run["rows"]["untrained encoder"]["R@1"] for run in runs[:2]]
    fast_m, slow_m, fast_g, slow_g = (100 * run["validation"]["MAP@R"] for run in runs[2:])
    text = (
        f"The untrained encoder has an R@1 of {untrained[0]:.1f} on CUB and {untrained[1]:.1f} on Cars. Each row uses "
        "the learning rate of the proxies that scored higher on held-out classes. At the lower rate, VPTSP-M+B falls "
        f"from {fast_m:.1f} to {slow_m:.1f} held-out MAP@R on CUB; VPTSP-G+B has {fast_g:.2f} and {slow_g:.2f} on "
        "Cars, which hardly differ."
    )
    return paragraph(text)


ALIKE = {
    "VPT+B": {"cub": "tried/cub/vpt-bitfit-proxy-rate-1e-2", "cars": "tried/cars/vpt-bitfit-proxy-rate-1e-2"},
    "VPTSP-M+B": {"cub": "cub/vptsp-m", "cars": "tried/cars/vptsp-m-rate-1.5e-3"},
    "VPTSP-G+B": {"cub": "tried/cub/vptsp-g-proxy-rate-1e-2", "cars": "tried/cars/vptsp-g-rate-1.5e-3"},
}
"""runs with the same learning rates: 1.5e-3, proxies 1e-2"""
RELEASED = {
    "VPT+B": {"cub": "released/cub/vpt-bitfit", "cars": "released/cars/vpt-bitfit"},
    "VPTSP-G+B": {"cub": "released/cub/vptsp-g", "cars": "released/cars/vptsp-g"},
    "VPTSP-G+B, patience 50": {"cars": "released/cars/vptsp-g-patience-50"},
}
"""runs in the setting of VPTSP's released code"""


def alike_table() -> str:
    """Runs with and without semantic proxies at the same learning rates, seed by seed."""
    return _seed_by_seed(ALIKE, {"lr": 1.5e-3, "proxy_lr": 1e-2})


def released_table() -> str:
    """Runs with and without semantic proxies in the setting of VPTSP's released code."""
    return _seed_by_seed(RELEASED, {"batch": 64, "per_class": 2})


def _seed_by_seed(studies: dict[str, dict[str, str]], train: dict[str, float]) -> str:
    """A table of runs that differ only in the proxies and in patience; `train` holds settings that all runs share."""
    results, rows = groups(VIT_RESULTS), []
    for data, title in (("cub", "CUB"), ("cars", "Cars")):
        baseline = results.get(studies["VPT+B"][data], {})
        for name, places in studies.items():
            runs = results.get(places.get(data, ""), {})
            runs = {seed: run for seed, run in runs.items() if seed in baseline}
            if not runs:
                continue
            for seed, run in runs.items():
                assert train.items() <= run["recipe"]["train"].items(), (data, name)
                for part in ("data", "view", "encoder", "train"):
                    sides = [dict(side["recipe"][part], patience=None) for side in (run, baseline[seed])]
                    assert sides[0] == sides[1], (data, name, part)
            scores = [score(run, "R@1") for run in runs.values()]
            differences = [score(run, "R@1") - score(baseline[seed], "R@1") for seed, run in runs.items()]
            count = "" if len(runs) == 3 else f" (seeds {', '.join(runs)})"
            rows.append([
                name, title, ", ".join(f"{100 * value:.1f}" for value in scores) + count, interval(scores),
                "" if name == "VPT+B" else interval(differences, sign="+"),
                interval([score(run, "MAP@R") for run in runs.values()]),
                ", ".join(f"{100 * run['validation']['MAP@R']:.1f}" for run in runs.values()),
                ", ".join(f"{run['curve'][-1]['loss']:.2f}" for run in runs.values()),
                ", ".join(str(run["epochs"]) for run in runs.values()),
            ])  # fmt: skip
    columns = ["tuning", "data", "R@1, seed by seed", "R@1", "R@1 to VPT+B", "MAP@R", "held-out MAP@R"]
    return table([*columns, "training loss", "epochs"], rows)


PRINTED = {
    "full": (345, 6.0),
    "linear": (120, 1.7),
    "bitfit": (210, 4.4),
    "adapter": (190, 1.9),
    "vpt": (226, 2.2),
    "vptsp-g": (260, 2.6),
}
"""ms in VPTSP's Table 10, GB in its Table 1; the last three have checkpointed blocks there"""
KINDS = ("eager", "compiled", "recorded")


def tuning_table() -> str:
    """The recorded run of benchmarks/tuning.py: time and memory as multiples of eager full fine-tuning."""
    study = read(BENCHMARKS / "tuning-cuda.json")
    by_batch = study["by batch"]
    sizes = sorted(by_batch, key=int)
    rows = []
    for side in dict.fromkeys(name.rsplit(", ", 1)[0] for name in by_batch[sizes[0]]):
        row = [side, ""]
        if side in PRINTED:
            row[1] = ", ".join(f"{value / full:.2f}" for value, full in zip(PRINTED[side], PRINTED["full"]))
        for size in sizes:
            kinds = [by_batch[size].get(f"{side}, {kind}", {}) for kind in KINDS]
            row.append(", ".join(_ratio(kind, "times full, eager") for kind in kinds))
            row.append(", ".join(_memory(kind) for kind in kinds))
        rows.append(row)
    columns = ["tuning or method", "paper, batch 64: time, memory"]
    for size in sizes:
        columns += [f"batch {size}: time", "memory"]
    costs = [by_batch[size]["full, eager"] for size in sizes]
    full = "; ".join(
        f"{cost['step_ms']:.0f} ms and {cost['memory_mb']:,.0f} MB ({cost['in use_mb']:,.0f} in use) with batches of "
        f"{size}"
        for size, cost in zip(sizes, costs)
    )
    vptsp = {kind: [by_batch[size].get(f"vptsp-g, {kind}", {}) for size in sizes] for kind in KINDS}
    ratios = [cost[f"times full, {kind}"] for kind, sides in vptsp.items() for cost in sides if "step_ms" in cost]
    text = (
        f"Eager full fine-tuning takes {full}. `vptsp-g` takes {min(ratios):.1f} to {max(ratios):.1f} times as long "
        f"as full fine-tuning of the same kind (eager, compiled or recorded). {_recomputing(by_batch)} "
        f"{_rounds(by_batch)}"
    )
    return "\n\n".join([table(columns, rows), paragraph(text), _by_classes(study["by classes"])])


def kernels_table() -> str:
    """The recorded run of benchmarks/tuning_kernels.py: the time of the kernels of a recorded step, by kind."""
    study = read(BENCHMARKS / "tuning-kernels-cuda.json")
    sides = ("full", "vpt", "vptsp-g")
    rows = []
    for batch, found in sorted(study["by batch"].items(), key=lambda item: int(item[0])):
        full = found["full"]
        for kind, whole in full["kinds"].items():
            parts = [found[side]["kinds"].get(kind, {"ms": 0.0, "launches": 0.0}) for side in sides]
            cells = [f"{part['ms']:.1f} ms, {part['launches']:.0f}" for part in parts]
            rows.append([batch, kind, *cells, f"{parts[-1]['ms'] / whole['ms']:.2f}"])
        sums = [f"{found[side]['kernels_ms']:.1f} ms" for side in sides]
        rows.append([batch, "all kernels", *sums, f"{found['vptsp-g']['kernels_ms'] / full['kernels_ms']:.2f}"])
        steps = [f"{found[side]['step_ms']:.1f} ms" for side in sides]
        rows.append([batch, "the step", *steps, f"{found['vptsp-g']['step_ms'] / full['step_ms']:.2f}"])
    return table(["batch", "kernels", *(f"`{side}`: time, launches" for side in sides), "`vptsp-g` / `full`"], rows)


def _recomputing(by_batch: dict) -> str:
    """The memory and time of a recorded step that computes the hidden layers of the MLPs twice."""
    pairs = [(sides["vptsp-g, recorded"], sides["vptsp-g, mlp again, recorded"]) for sides in by_batch.values()]
    memory_savings = [100 * (1 - again["memory_mb"] / plain["memory_mb"]) for plain, again in pairs]
    extra_times = [100 * (again["step_ms"] / plain["step_ms"] - 1) for plain, again in pairs]
    return (
        f"`mlp again` saves {min(memory_savings):.0f} to {max(memory_savings):.0f} % of the memory that a recorded "
        f"step reserves, and takes up to {max(extra_times):.0f} % more time."
    )


def _rounds(by_batch: dict) -> str:
    """The spread of the rounds of a benchmark."""
    spans = []
    for size in sorted(by_batch, key=int):
        ends = [(*cost["lowest and highest round"], cost["step_ms"]) for cost in by_batch[size].values()]
        spans.append(f"{100 * statistics.median((high - low) / middle for low, high, middle in ends):.0f} %")
    *first, last = spans
    return (
        f"The fastest and the slowest round of a row differ by {', '.join(first)} and {last} of its time (median over "
        "the rows); smaller differences in the table mean nothing."
    )


def _by_classes(sizes: dict) -> str:
    """The GPU memory that more classes need."""
    few, many = sizes["memory_mb"].items()
    rows = sizes["free proxies, their gradient and two moments, stored proxies, mb"]
    prompts = sizes["class prompts, their gradient and two moments, if they lay on the device, mb"]
    text = (
        f"With {int(many[0]):,} classes instead of {few[0]}, a step of VPTSP-G with {sizes['batch']} images uses "
        f"{many[1]:,.0f} MB at its peak instead of {few[1]:,.0f}: {sizes['difference_mb']:.1f} MB more. By "
        "calculation, five arrays with a row for each class (free proxies, their gradient, two moments, stored "
        f"proxies) grow by {rows:.1f} MB, and an array of similarities by {sizes['one (B, C) array, mb']:.1f}. Class "
        "prompts of so many classes lie in host memory; on the accelerator, they, their gradient and their moments "
        f"would take {prompts:,.0f} MB."
    )
    return paragraph(text)


def _ratio(cost: dict, key: str) -> str:
    return f"{cost[key]:.2f}" if key in cost else "-"


def _memory(cost: dict) -> str:
    """Reserved memory, and in brackets the memory in use if it is known (it is unknown for a recorded step)."""
    used = f" ({_ratio(cost, 'in use times full, eager')})" if "in use times full, eager" in cost else ""
    return _ratio(cost, "memory times full, eager") + used
