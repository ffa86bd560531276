"""Tables of the results of 0.1.0: ResNet-50 at 160 pixels on CUB, and the four folds of MLRC."""

from __future__ import annotations

import statistics

from generator.scores import RESULTS, groups, interval, machine, score, table

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
"""the baseline of each row of results/cub-160/"""
FIRST = "cub-proxy-anchor-160"
"""folder of results/ with the first runs"""
ORDER = ("proxy-anchor", "proxy-isa", "vcpa", "proxy-anchor-plain", "proxy-isa-plain", "margin-contrastive", "ccp")


def first_table() -> str:
    """One row for each group of the first runs: mean over the seeds, smallest and largest."""
    rows = []
    for name, by_seed in groups(RESULTS / FIRST).items():
        runs = list(by_seed.values())
        scores = [_range([score(run, metric) for run in runs]) for metric in ("R@1", "MAP@R", "nDCG@8")]
        untrained = _range([run["rows"]["untrained encoder"]["R@1"] for run in runs])
        seconds = statistics.mean(run["seconds"] for run in runs)
        recipe = runs[0]["recipe"]
        backbone = f"{recipe['encoder']['backbone']}, {recipe['view']['size']}"
        rows.append([name, backbone, str(len(runs)), *scores, untrained, f"{seconds:.0f} s", machine(runs[0])])
    columns = ["runs", "backbone, px", "seeds", "R@1", "MAP@R", "nDCG@8", "untrained R@1", "time of a run", "machine"]
    return table(columns, rows)


def _range(values: list[float]) -> str:
    mean, low, high = (f"{100 * value:.1f}" for value in (statistics.mean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def compare_table() -> str:
    """The rows of results/cub-160/ compared with their baselines: means over the seeds and 95 % Student intervals."""
    results = groups(RESULTS / "cub-160")
    rows = []
    for name in [*(name for name in ORDER if name in results), *sorted(set(results) - set(ORDER))]:
        runs, baseline = results[name], BASELINES.get(name)
        differences = ["", "", ""]
        pairs = [(run, results[baseline][seed]) for seed, run in runs.items() if seed in results.get(baseline, {})]
        if pairs:
            differences = [f"`{baseline}`"] + [
                interval([score(run, metric) - score(other, metric) for run, other in pairs], sign="+")
                for metric in ("R@1", "MAP@R")
            ]
        held_out = f"{100 * statistics.mean(run['validation']['MAP@R'] for run in runs.values()):.1f}"
        scores = [interval([score(run, metric) for run in runs.values()]) for metric in ("R@1", "MAP@R")]
        epochs = ", ".join(f"{run['chosen_epoch']:.3g}" for run in runs.values())
        rows.append([f"`{name}`", str(len(runs)), held_out, *scores, *differences, epochs])
    columns = [
        "row", "seeds", "held-out MAP@R", "R@1", "MAP@R", "baseline", "R@1 difference", "MAP@R difference",
        "epochs chosen",
    ]  # fmt: skip
    return table(columns, rows)


def mlrc_table() -> str:
    """One row for the mean over the models of the folds, and one for their concatenation."""
    from proxymetric.studies.collected import read_runs

    rows = []
    for name, result in read_runs(RESULTS / "mlrc").items():
        size = f"{result['folds']} x {result['dim']}-D"
        for kind, label in (("average", f"average of {size}"), ("concatenated", f"concatenation of {size}")):
            scores = [f"{100 * result[kind][metric]:.1f}" for metric in ("R@1", "P@R", "MAP@R")]
            rows.append([name, label, *scores, f"{result['seconds']:.0f} s", machine(result)])
    return table(["runs", "models", "R@1", "P@R", "MAP@R", "time", "machine"], rows)
