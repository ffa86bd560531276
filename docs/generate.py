"""Write the generated tables of the README: `python docs/generate.py`. Nobody types a number there."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from scores import ROOT, interval, paragraph, score
from tunings import alike_table, parameters_table, released_table, tuned_table, tuning_table


def methods_table() -> str:
    """The catalogue as it is in the code."""
    from proxymetric.papers import CATALOGUE

    rows = ["| method | paper | choose it |", "|---|---|---|"]
    rows += [f"| `{name}` | {build.about.paper} | {build.about.choose} |" for name, build in CATALOGUE.items()]
    return "\n".join(rows)


def results_table() -> str:
    """One row per study under results/: the mean over its seeds, the smallest and largest where there are several."""
    studies: dict[str, list[dict]] = {}
    for file in sorted((ROOT / "results").glob("*.json")):
        studies.setdefault(re.sub(r"-seed\d+$", "", file.stem), []).append(json.loads(file.read_text()))
    rows = [
        "| study | backbone, px | seeds | R@1 | MAP@R | nDCG@8 | untrained R@1 | time of a run | machine |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in studies.items():
        first = runs[0]
        cells = [
            _spread([run["rows"]["trained encoder"][metric] for run in runs]) for metric in ("R@1", "MAP@R", "nDCG@8")
        ]
        untrained = _spread([run["rows"]["untrained encoder"]["R@1"] for run in runs])
        machine = first["machine"].get("gpu") or f"{first['machine']['cores']} cores, {first['machine']['processor']}"
        seconds = statistics.mean(run["seconds"] for run in runs)
        backbone = f"{first['recipe']['encoder']['backbone']}, {first['recipe']['view']['size']}"
        rows.append(
            f"| {name} | {backbone} | {len(runs)} | {' | '.join(cells)} | {untrained} | {seconds:.0f} s | {machine} |"
        )
    return "\n".join(rows)


BASELINES = {
    "proxy-isa": "proxy-anchor",
    "vcpa": "proxy-anchor",
    "ccp": "margin-contrastive",
    "proxy-isa-plain": "proxy-anchor-plain",
    "tried/proxy-isa-earlier": "proxy-anchor",
    "tried/proxy-isa-k-0.4-earlier": "proxy-anchor",
    "tried/vcpa-tau-0.1": "proxy-anchor",
    "tried/vcpa-tau-0.001-halving": "proxy-anchor",
    "tried/ccp-proxy-rate-1e-3": "margin-contrastive",
}
"""what each study under results/cub-160/ is held against"""
ORDER = ("proxy-anchor", "proxy-isa", "vcpa", "proxy-anchor-plain", "proxy-isa-plain", "margin-contrastive", "ccp")


def compare_table() -> str:
    """The studies of results/cub-160/ beside their baselines: means over the seeds and 95 % intervals (Student's t)."""
    folder = ROOT / "results" / "cub-160"
    found: dict[str, dict[str, dict]] = {}
    for file in sorted(folder.rglob("*.json")):
        study, seed = file.relative_to(folder).with_suffix("").as_posix().rsplit("-seed", 1)
        found.setdefault(study, {})[seed] = json.loads(file.read_text())
    rows = [
        "| study | seeds | held-out MAP@R | R@1 | MAP@R | against | R@1 | MAP@R | epochs chosen |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for study in (*ORDER, *sorted(set(found) - set(ORDER))):
        runs, base = found[study], BASELINES.get(study)
        chosen = f"{100 * statistics.mean(run['validation']['MAP@R'] for run in runs.values()):.1f}"
        gains = ["", "", ""]
        if base is not None:
            pairs = [(run, found[base][seed]) for seed, run in runs.items()]
            gains = [f"`{base}`"] + [
                interval([score(run, name) - score(other, name) for run, other in pairs], sign="+")
                for name in ("R@1", "MAP@R")
            ]
        cells = [interval([score(run, name) for run in runs.values()]) for name in ("R@1", "MAP@R")]
        epochs = ", ".join(f"{run['chosen_epoch']:.3g}" for run in runs.values())
        rows.append(f"| `{study}` | {len(runs)} | {chosen} | {' | '.join(cells)} | {' | '.join(gains)} | {epochs} |")
    return "\n".join(rows)


def step_table() -> str:
    """The recorded runs of benchmarks/step.py: each method's step beside Proxy-Anchor's."""
    rows = [
        "| machine | setting | method | times Proxy-Anchor's step (lowest and highest round) | expected |",
        "|---|---|---|---|---|",
    ]
    for kind in ("cuda", "cpu"):
        study = json.loads((ROOT / "benchmarks" / "results" / f"step-{kind}.json").read_text())
        machine = study["machine"].get("gpu") or f"CPU, {study['machine']['threads']} thread"
        for setting, part in study["settings"].items():
            for method, side in part["sides"].items():
                ratio, target = side.get("times proxy-anchor"), study["targets"].get(f"{method} times proxy-anchor")
                if ratio is None:
                    continue
                low, high = side["times proxy-anchor, lowest and highest round"]
                wanted = target if kind == "cuda" and target else ""
                rows.append(
                    f"| {machine} | {setting} | `{method}` | {ratio:.2f} ({low:.2f} to {high:.2f}) | {wanted} |"
                )
    return "\n".join(rows)


def mlrc_table() -> str:
    """One row per study under results/mlrc/: the mean over the folds' models, and all of them side by side."""
    rows = ["| study | models | R@1 | P@R | MAP@R | time | machine |", "|---|---|---|---|---|---|---|"]
    for file in sorted((ROOT / "results" / "mlrc").glob("*.json")):
        study = json.loads(file.read_text())
        size = f"{study['folds']} x {study['dim']}-D"
        for kind, label in (("average", f"average of {size}"), ("concatenated", f"joined {size}")):
            cells = " | ".join(f"{100 * study[kind][metric]:.1f}" for metric in ("R@1", "P@R", "MAP@R"))
            machine = study["machine"].get("gpu") or f"{study['machine']['cores']} cores"
            rows.append(f"| {file.stem} | {label} | {cells} | {study['seconds']:.0f} s | {machine} |")
    return "\n".join(rows)


def metrics_table() -> str:
    """The recorded runs of benchmarks/metrics.py: CPU time and extra memory beside the peer's, and the GPU's time."""
    rows = [
        "| points | machine | here | pytorch-metric-learning, faiss | time | extra memory |",
        "|---|---|---|---|---|---|",
    ]
    folder = ROOT / "benchmarks" / "results"
    for size in json.loads((folder / "metrics-cpu.json").read_text())["cpu"].values():
        for threads in (1, 2):
            run = size[f"{threads} threads"]
            ours, theirs = run["proxymetric"], run["pytorch-metric-learning"]
            rows.append(
                f"| {size['points']:,} | CPU, threads: {threads} | {_cost(ours)} | {_cost(theirs)} | "
                f"{run['cpu_ratio']:.2f} x | {run['memory_ratio']:.2f} x |"
            )
    cuda = json.loads((folder / "metrics-cuda.json").read_text())
    seconds = cuda["cuda"]["on the GPU"]["seconds"]
    rows.append(f"| {cuda['cuda']['points']:,} | {cuda['machine']['gpu']} | {seconds:.2f} s | | | |")
    return "\n".join(rows)


def losses_table() -> str:
    """The recorded run of benchmarks/losses.py on a CPU: forward and backward of a loss beside the peer's."""
    study = json.loads((ROOT / "benchmarks" / "results" / "losses-cpu.json").read_text())
    rows = [
        "| loss | classes | here | pytorch-metric-learning | time | extra memory |",
        "|---|---|---|---|---|---|",
    ]
    for loss, sizes in study["losses"].items():
        for size, part in sizes.items():
            sides, classes = part.get("sides", {}), int(size.split()[0])
            if "proxymetric" not in sides or "peer" not in sides:
                continue
            ours, theirs = (f"{1000 * side['seconds']:,.0f} ms, {side['extra_mb']:,.0f} MB"
                            for side in (sides["proxymetric"], sides["peer"]))  # fmt: skip
            ratio = part["of the peer's"]
            named = f"`{loss}`" + (f", {part['per_class']} a class" if part["per_class"] > 1 else "")
            rows.append(
                f"| {named} | {classes:,} | {ours} | {theirs} | {ratio['time']:.2f} x | {ratio['memory']:.2f} x |"
            )
    return "\n".join(rows)


def _cost(side: dict) -> str:
    return f"{side['cpu']:.1f} s CPU, {side['extra_mb']:,.0f} MB"


def _spread(values: list[float]) -> str:
    mean = f"{100 * statistics.mean(values):.1f}"
    low, high = f"{100 * min(values):.1f}", f"{100 * max(values):.1f}"
    return mean if low == high else f"{mean} ({low} to {high})"


def rates_table() -> str:
    """The recorded run of benchmarks/losses_cuda.py: Proxy-Anchor over very many classes on one GPU."""
    study = json.loads((ROOT / "benchmarks" / "results" / "losses-cuda.json").read_text())
    rows = [
        "| batch | classes | fused | of proxies and gradient | chunks in torch | compiled formula | formula |",
        "|---|---|---|---|---|---|---|",
    ]
    for batch, sizes in sorted(study["proxy-anchor"].items(), key=lambda each: int(each[0].split()[1])):
        for classes, sides in sorted(sizes.items(), key=lambda each: int(each[0].split()[0])):
            fused = sides["triton"]
            cells = [batch.split()[1], f"{int(classes.split()[0]):,}"]
            cells += [
                f"{fused['ms']:,.1f} ms, {fused['tflops']:.0f} TFLOP/s ({100 * fused['of the matrix rate']:.0f} %)",
                f"{fused['of proxies and gradient']:.2f} x",
            ]
            for side in ("chunked", "dense, compiled", "dense"):
                got = sides[side]
                cells.append(f"{got['ms']:,.1f} ms" if "ms" in got else "does not fit")
            rows.append(f"| {' | '.join(cells)} |")
    ten = study["ten per class"]
    soft, mpa = (
        " and ".join(f"{found['triton']['ms']:.0f} ms" for found in ten[name].values())
        for name in ("soft-triple", "mpa-ap")
    )
    rows.append(
        f"\nOne large product reaches {study['matrix_tflops']:.0f} TFLOP/s in the same run: 100 %. Ten proxies a\n"
        "class for 100,000 classes are a million rows: with 512 and 4,096 embeddings `soft-triple` takes\n"
        f"{soft}, `mpa-ap` {mpa}. A mask of all pairs of proxies, as other libraries make one, would have\n"
        f"{ten['mask of all pairs of proxies, GiB']:.0f} GiB.\n\n{_softmax(study['others']['norm-softmax'])}"
    )
    return "\n".join(rows)


def _softmax(found: dict) -> str:
    """A loss over the classes, with and without room for its similarities, beside the compiled formula."""
    said = []
    for batch, sizes in found.items():
        for classes, sides in sizes.items():
            spent = {side: f"{one['ms']:.1f} ms in {one['extra_mb'] / 1000:.1f} GB" for side, one in sides.items()}
            said.append(
                f"with {batch.split()[1]} embeddings and {int(classes.split()[0]):,} classes {spent['triton']}, "
                f"{spent['triton, kept']} where all similarities are kept, and as a compiled formula "
                f"{spent['dense, compiled']}"
            )
    return paragraph(f"`norm-softmax` takes {'; '.join(said)}.")


PARTS = {
    "methods": methods_table,
    "parameters": parameters_table,
    "tuned": tuned_table,
    "alike": alike_table,
    "released": released_table,
    "tuning": tuning_table,
    "results": results_table,
    "compare": compare_table,
    "mlrc": mlrc_table,
    "step": step_table,
    "metrics": metrics_table,
    "losses": losses_table,
    "rates": rates_table,
}


def filled(text: str) -> str:
    """The README with its generated parts made anew."""
    for name, make in PARTS.items():
        part = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.S)
        assert part.search(text), name
        text = part.sub(lambda found, make=make: f"{found[1]}{make()}\n{found[2]}", text)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = filled(before)
    if "--check" in sys.argv:
        sys.exit(0 if after == before else "README.md is out of date: python docs/generate.py")
    readme.write_text(after, encoding="utf-8")
