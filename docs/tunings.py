"""The README's tables of vision transformers: parameters, results, and what a step costs, beside VPTSP's."""

from __future__ import annotations

import json
import statistics

from scores import ROOT, interval, paragraph, score

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
"""rows of VPTSP's Table 1: what they are here, method and tuning, and the millions of parameters printed there"""


def parameters_table() -> str:
    """What each tuning trains of a ViT-S/16 with 384-D vectors and 100 classes, beside VPTSP's Table 1."""
    from proxymetric import _torchvision  # noqa: F401
    import timm  # isort: skip

    rows = [
        "| tuning | the paper's | trained here | with its classifier | to the paper's | what is trained here |",
        "|---|---|---|---|---|---|",
    ]
    classifier = timm.get_pretrained_cfg("vit_small_patch16_224.augreg_in21k").num_classes
    for label, method, tuning, printed in TABLE_1:
        parts, width = _trained(method, tuning)
        total = sum(parts.values())
        # The released code keeps the backbone's classifier, which no vector passes, and so its bias is one of "all".
        unused = classifier * (width + 1 if "backbone" in parts else 1 if "biases" in parts else 0)
        beside = ["", f"{(total + unused) / 1e6:.3f} M" if unused else "", ""]
        if printed is not None:
            beside[0] = f"{printed:.1f} M" if printed > 10 else f"{printed:.2f} M"
            beside[2] = f"{100 * ((total + unused) / (1e6 * printed) - 1):+.1f} %"
        named = " + ".join(f"{part} {count:,}" for part, count in parts.items())
        rows.append(f"| {label} | {beside[0]} | {total / 1e6:.3f} M | {beside[1]} | {beside[2]} | {named} |")
    return "\n".join(rows)


def _trained(method: str, tuning: str | dict) -> tuple[dict[str, int], int]:
    """How many parameters of each part of encoder and criterion are trained, and the width of the encoder's tokens."""
    import torch

    import proxymetric as pm
    from proxymetric.encoders import build, tuned_parameters

    # Shapes are enough to count, and on "meta" there is nothing else.
    with torch.device("meta"):
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
"""recipes of vit-s-128: what VPTSP calls them, R@1 and MAP@R printed for CUB (Table 1) and for Cars (Tables 2 and 4)"""


def tuned_table() -> str:
    """The runs under results/vit-s-128/ beside the paper's: means over the seeds and 95 % intervals (Student's t)."""
    head = "paper: R@1, MAP@R | R@1 | MAP@R | R@1 to VPT+B"
    rows = [f"| tuning | CUB, {head} | Cars, {head} |", "|---|---|---|---|---|---|---|---|---|"]
    for name, (label, *printed) in TUNED.items():
        cells = [label]
        for data, theirs in zip(("cub", "cars"), printed, strict=True):
            runs, base = _seeds(data, name), _seeds(data, "vpt-bitfit")
            few = "" if len(runs) == 3 else f" ({len(runs)} seeds)"
            cells.append(", ".join(map(str, theirs)))
            cells += [interval([score(run, metric) for run in runs.values()]) + few for metric in ("R@1", "MAP@R")]
            gains = [score(run, "R@1") - score(base[seed], "R@1") for seed, run in runs.items()]
            cells.append("" if name == "vpt-bitfit" else interval(gains, sign="+"))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, "", _at_other_rates()])


def _at_other_rates() -> str:
    """What the table does not show: where the runs start, and what the proxies' rate does."""
    before = [100 * _seeds(data, "full")["0"]["rows"]["untrained encoder"]["R@1"] for data in ("cub", "cars")]
    runs = _seeds("cub", "vptsp-m")["0"], _seeds("tried/cub", "vptsp-m-proxy-rate-1e-3")["0"]
    even = _seeds("cars", "vptsp-g")["0"], _seeds("tried/cars", "vptsp-g-proxy-rate-1e-3")["0"]
    first, slow, one, other = (100 * run["validation"]["MAP@R"] for run in (*runs, *even))
    words = (
        f"The untrained encoder has an R@1 of {before[0]:.1f} on CUB and {before[1]:.1f} on Cars. Rows have the "
        f"proxies' rate that suits them on held-out classes: at the slower one VPTSP-M+B falls from {first:.1f} to "
        f"{slow:.1f} held-out MAP@R on CUB; VPTSP-G+B has {one:.2f} and {other:.2f} on Cars, which is hardly a choice."
    )
    return paragraph(words)


ALIKE = {
    "VPT+B": {"cub": "tried/cub/vpt-bitfit-proxy-rate-1e-2", "cars": "tried/cars/vpt-bitfit-proxy-rate-1e-2"},
    "VPTSP-M+B": {"cub": "cub/vptsp-m", "cars": "tried/cars/vptsp-m-rate-1.5e-3"},
    "VPTSP-G+B": {"cub": "tried/cub/vptsp-g-proxy-rate-1e-2", "cars": "tried/cars/vptsp-g-rate-1.5e-3"},
}
"""runs with the same rates for all: 1.5e-3, proxies 1e-2"""
RELEASED = {
    "VPT+B": {"cub": "released/cub/vpt-bitfit", "cars": "released/cars/vpt-bitfit"},
    "VPTSP-G+B": {"cub": "released/cub/vptsp-g", "cars": "released/cars/vptsp-g"},
    "VPTSP-G+B, patience 50": {"cars": "released/cars/vptsp-g-patience-50"},
}
"""runs in the setting of VPTSP's released code"""


def alike_table() -> str:
    """With and without semantic proxies at the same rates, seed by seed."""
    return _seed_by_seed(ALIKE, {"lr": 1.5e-3, "proxy_lr": 1e-2})


def released_table() -> str:
    """The same in the setting of VPTSP's released code."""
    return _seed_by_seed(RELEASED, {"batch": 64, "per_class": 2})


def _seed_by_seed(studies: dict[str, dict[str, str]], train: dict[str, float]) -> str:
    """Runs that differ in nothing but the proxies, and at most in their patience; all have these keys of `[train]`."""
    rows = [
        "| tuning | data | R@1, seed by seed | R@1 | R@1 to VPT+B | MAP@R | held-out MAP@R | training loss | epochs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for data, label in (("cub", "CUB"), ("cars", "Cars")):
        base = _seeds(*studies["VPT+B"][data].rsplit("/", 1))
        for name, places in studies.items():
            if data not in places:
                continue
            runs = _seeds(*places[data].rsplit("/", 1))
            for seed, run in runs.items():
                assert train.items() <= run["recipe"]["train"].items(), (data, name)
                for part in ("data", "view", "encoder", "train"):
                    mine, theirs = (dict(each["recipe"][part], patience=None) for each in (run, base[seed]))
                    assert mine == theirs, (data, name, part)
            scores = [score(run, "R@1") for run in runs.values()]
            gains = [score(run, "R@1") - score(base[seed], "R@1") for seed, run in runs.items()]
            few = "" if len(runs) == 3 else f" (seeds {', '.join(runs)})"
            cells = [name, label, ", ".join(f"{100 * each:.1f}" for each in scores) + few, interval(scores)]
            cells.append("" if name == "VPT+B" else interval(gains, sign="+"))
            cells.append(interval([score(run, "MAP@R") for run in runs.values()]))
            cells.append(", ".join(f"{100 * run['validation']['MAP@R']:.1f}" for run in runs.values()))
            cells.append(", ".join(f"{run['curve'][-1]['loss']:.2f}" for run in runs.values()))
            cells.append(", ".join(str(run["epochs"]) for run in runs.values()))
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _seeds(folder: str, name: str) -> dict[str, dict]:
    files = sorted((ROOT / "results" / "vit-s-128" / folder).glob(f"{name}-seed*.json"))
    return {file.stem.rsplit("-seed", 1)[1]: json.loads(file.read_text()) for file in files}


PRINTED = {
    "full": (345, 6.0),
    "linear": (120, 1.7),
    "bitfit": (210, 4.4),
    "adapter": (190, 1.9),
    "vpt": (226, 2.2),
    "vptsp-g": (260, 2.6),
}
"""ms of VPTSP's Table 10, GB of its Table 1, whose last three have checkpointed blocks"""
KINDS = ("eager", "compiled", "recorded")


def tuning_table() -> str:
    """The recorded run of benchmarks/tuning.py: time and memory in terms of eager full fine-tuning."""
    study = json.loads((ROOT / "benchmarks" / "results" / "tuning-cuda.json").read_text())
    sizes = sorted(study["by batch"], key=int)
    heads = " | ".join(f"batch {size}: time | memory" for size in sizes)
    rows = [f"| side | paper, batch 64: time, memory | {heads} |", "|---|---|" + "---|---|" * len(sizes)]
    for side in dict.fromkeys(word.rsplit(", ", 1)[0] for word in study["by batch"][sizes[0]]):
        cells = [side, ""]
        if side in PRINTED:
            cells[1] = ", ".join(
                f"{mine / full:.2f}" for mine, full in zip(PRINTED[side], PRINTED["full"], strict=True)
            )
        for size in sizes:
            found = [study["by batch"][size].get(f"{side}, {kind}", {}) for kind in KINDS]
            cells.append(", ".join(_times(each, "times full, eager") for each in found))
            cells.append(", ".join(_memory(each) for each in found))
        rows.append(f"| {' | '.join(cells)} |")
    full = [study["by batch"][size]["full, eager"] for size in sizes]
    spent = ", ".join(
        f"{each['step_ms']:.0f} ms and {each['memory_mb']:,.0f} MB ({each['in use_mb']:,.0f} in use)" for each in full
    )
    alike = {kind: [study["by batch"][size].get(f"vptsp-g, {kind}", {}) for size in sizes] for kind in KINDS}
    ratios = [each[f"times full, {kind}"] for kind, found in alike.items() for each in found if "step_ms" in each]
    words = (
        f"Eager full fine-tuning takes {spent}. `vptsp-g` takes {min(ratios):.1f} to {max(ratios):.1f} times as long "
        f"as full fine-tuning of the same kind: eager, compiled or recorded. {_again(study['by batch'])} "
        f"{_rounds(study['by batch'])}"
    )
    return "\n".join([*rows, "", paragraph(words), "", _by_classes(study["by classes"])])


def _again(found: dict) -> str:
    """What it saves and costs a recorded step to compute the hidden layers of the MLPs again."""
    pairs = [(sides["vptsp-g, recorded"], sides["vptsp-g, mlp again, recorded"]) for sides in found.values()]
    saved = [100 * (1 - again["memory_mb"] / plain["memory_mb"]) for plain, again in pairs]
    longer = [100 * (again["step_ms"] / plain["step_ms"] - 1) for plain, again in pairs]
    return (
        f"`mlp again` saves {min(saved):.0f} to {max(saved):.0f} % of what a recorded step reserves, for up to "
        f"{max(longer):.0f} % more time."
    )


def _rounds(found: dict) -> str:
    """How far to trust a figure: by how much the rounds of one side differ."""
    spans = []
    for size in sorted(found, key=int):
        ends = [(*each["lowest and highest round"], each["step_ms"]) for each in found[size].values()]
        spans.append(f"{100 * statistics.median((high - low) / middle for low, high, middle in ends):.0f} %")
    *first, last = spans
    return (
        f"The fastest and the slowest round of a side are {', '.join(first)} and {last} of its time apart, in the "
        "median of the sides: differences below that say nothing."
    )


def _by_classes(found: dict) -> str:
    """What more classes cost the accelerator."""
    few, many = found["memory_mb"].items()
    needed = found["free proxies, their gradient and two moments, stored proxies, mb"]
    words = (
        f"With {int(many[0]):,} classes instead of {few[0]}, a step of VPTSP-G with {found['batch']} images has "
        f"{many[1]:,.0f} MB in use at its peak instead of {few[1]:,.0f}: {found['difference_mb']:.1f} more. Five "
        f"arrays of a row for each class more (free proxies, their gradient, two moments, stored proxies) are "
        f"{needed:.1f} MB, and one of similarities {found['one (B, C) array, mb']:.1f}. Class prompts lie in "
        "host memory; on the accelerator they, their gradient and their moments would take "
        f"{found['class prompts, their gradient and two moments, if they lay on the device, mb']:,.0f} MB."
    )
    return paragraph(words)


def _times(found: dict, key: str) -> str:
    return f"{found[key]:.2f}" if key in found else "-"


def _memory(found: dict) -> str:
    """Reserved memory, and in brackets that in use where it is known: of a recorded step it is not."""
    used = f" ({_times(found, 'in use times full, eager')})" if "in use times full, eager" in found else ""
    return _times(found, "memory times full, eager") + used
