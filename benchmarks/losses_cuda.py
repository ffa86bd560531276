"""Compares implementations of proxy losses over very many classes on one GPU.

    python benchmarks/losses_cuda.py                 131k, a million and ten million classes; about two minutes
    python benchmarks/losses_cuda.py --parts rates   some parts: rates, gradients, groups, others, curve, rows, profile
    python benchmarks/losses_cuda.py --plot          draw results/losses-cuda.png from the JSON; needs no GPU
    TRITON_INTERPRET=1 python benchmarks/losses_cuda.py --tiny    check that the benchmark runs, also without a GPU

The sides are the fused kernels ("triton"), chunks in torch ("chunked"), the formula on a matrix of all pairs ("dense"),
and the compiled formula ("dense, compiled"). Embeddings and proxies are bfloat16 with 512 dimensions. The embeddings
have unit length, as a criterion passes them on; the proxies are normalised in the step. A step computes the loss and
both gradients. The time is the median over steps after a first one, each synchronised with the GPU. The memory is the
peak of a step above embeddings and proxies; it includes the gradient of the proxies. TFLOP/s count three products,
6 B R D operations, on every side; the rate of one large product in the same run is the upper limit. A side that does
not fit is recorded as such. The results are written to results/losses-cuda.json after every measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, about, clock_mhz, spread, write
from torch import Tensor
from torch.nn import functional

from proxymetric.core.normalisation import unit
from proxymetric.core.pieces import Loss, References
from proxymetric.losses import MPAAP, CosFace, ProxyAnchor, SoftTriple
from proxymetric.ops import using

DIM = 512
BATCHES, CLASSES = (512, 4096), (131_072, 1_000_000, 10_000_000)
CURVE = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
ROWS = (2048, 4096, 8192, 8448, 16384, 16896, 33792)
"""numbers of rows of a chunk that are tried with batches of 4096"""
PER_CLASS, GROUPS = 10, 100_000
SIDES = ("dense", "dense, compiled", "chunked", "triton")
SCALE, MARGIN = 32.0, 0.1
UNFIT = "does not fit"
ALL = 2**36
"""budget in bytes of the sides "kept", which keep all similarities between the passes"""
REACH, SPARE = 350.0, 1.1
"""targets of the fused side: TFLOP/s at the second largest size, and memory at the largest size in multiples of
proxies and gradient"""
TINY = "--tiny" in sys.argv
if TINY:
    DIM, BATCHES, CLASSES, CURVE, ROWS, GROUPS = 16, (4, 8), (40, 100, 200), (20, 100), (16, 64), 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def dense(x: Tensor, y: Tensor, p: Tensor) -> Tensor:
    """Return Proxy-Anchor computed by its equation on a matrix of all pairs, with exponents in float32."""
    s = (x @ functional.normalize(p).T).float()
    own = y[:, None] == torch.arange(len(p), device=p.device)
    pull = torch.where(own, torch.exp(-SCALE * (s - MARGIN)), 0.0).sum(0)
    push = torch.where(own, 0.0, torch.exp(SCALE * (s + MARGIN))).sum(0)
    return pull.log1p().sum() / own.any(0).sum() + push.log1p().mean()


def dense_softmax(x: Tensor, y: Tensor, p: Tensor) -> Tensor:
    """Return the normalised softmax computed by its equation."""
    return functional.cross_entropy((SCALE * x @ functional.normalize(p).T).float(), y)


FORMULAS: dict[type[Loss], Callable[[Tensor, Tensor, Tensor], Tensor]] = {ProxyAnchor: dense, CosFace: dense_softmax}
"""the formula of a loss on a matrix of all pairs"""


def inputs(
    batch: int, classes: int, per_class: int = 1, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = unit(torch.randn(batch, DIM, generator=generator, device=DEVICE)).to(dtype).requires_grad_()
    y = torch.randint(classes, (batch,), generator=generator, device=DEVICE)
    p = torch.empty(classes * per_class, DIM, dtype=dtype, device=DEVICE)
    for some in p.split(2**20):
        some.normal_(generator=generator)
    return x, y, p.requires_grad_()


def step_of(
    side: str, loss: Loss, x: Tensor, y: Tensor, p: Tensor, per_class: int = 1, rows: int | None = None
) -> Callable[[], Tensor]:
    formula = FORMULAS.get(type(loss), dense)
    if side == "dense, compiled":
        formula = torch.compile(formula, dynamic=False)
    refs = References(p, torch.arange(len(p) // per_class, device=DEVICE).repeat_interleave(per_class), per_class)
    refs = refs._replace(normalise="l2")

    def step() -> Tensor:
        x.grad = p.grad = None
        if side.startswith("dense"):
            value = formula(x, y, p)
        else:
            name, _, kept = side.partition(", ")
            with using(name, rows=rows, budget=ALL if kept else None):
                value = loss(x, y, refs)
        value.backward()
        return value.detach()

    return step


def synchronise() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], Any], steps: int) -> list[float]:
    """Return the seconds of each step."""
    seconds = []
    for _ in range(steps):
        synchronise()
        start = time.perf_counter()
        step()
        synchronise()
        seconds.append(time.perf_counter() - start)
    return seconds


def measured(
    side: str,
    loss: Loss,
    batch: int,
    classes: int,
    per_class: int = 1,
    rows: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Return the time and memory of one side at one size."""
    if side == "dense, compiled":
        torch._dynamo.reset()
        pairs = 2 * dtype.itemsize * batch * classes  # bytes of all similarities and their gradient
        if pairs > torch.cuda.get_device_properties(0).total_memory:
            return {"failed": f"{UNFIT}: similarities and their gradient alone are {pairs / 2**30:.0f} GiB"}
    given = inputs(batch, classes, per_class, dtype)
    held = sum(each.numel() * each.element_size() for each in given)
    try:
        step = step_of(side, loss, *given, per_class, rows)
        value = step()  # compiles, selects matrix products, fills the memory pool
        (one,) = timed(step, 1)
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        given[0].grad = given[2].grad = None
        labels = classes * per_class * 8  # bytes of the references' labels, which the step holds
        seconds = timed(step, min(max(round(0.3 / one), 3), 50))  # the times of 1 ms steps vary by a third
        peak = torch.cuda.max_memory_allocated() - held - labels if DEVICE == "cuda" else 0
    except torch.OutOfMemoryError:
        return {"failed": UNFIT}
    except Exception as error:  # the other sides are still measured; the run fails at its end
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        step = None  # type: ignore[assignment]
        given = ()  # type: ignore[assignment]
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    median, size = statistics.median(seconds), classes * per_class
    return {
        "ms": round(median * 1e3, 3),
        "spread": spread([each * 1e3 for each in seconds], 3),
        "steps": len(seconds),
        "tflops": round(6 * batch * size * DIM / median / 1e12, 1),
        "extra_mb": round(peak / 2**20, 1),
        "of proxies and gradient": round((held + peak) / (2 * size * DIM * dtype.itemsize), 3),
        "loss": float(value),
    }


def matrix_rate() -> float:
    """Return the TFLOP/s of one large bfloat16 product."""
    size = 64 if TINY else 8192
    a, b = (torch.randn(size, size, device=DEVICE).bfloat16() for _ in range(2))
    out = torch.empty_like(a)

    def ten() -> None:
        for _ in range(10):
            torch.mm(a, b, out=out)

    timed(ten, 1)
    return 20 * size**3 / statistics.median(timed(ten, 3)) / 1e12


class Record:
    """The measurements so far; every new one is written to disk at once."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        self.wrong: list[str] = []
        """errors: sides that failed, or whose loss differs from that of the fused side; they fail the run at its end"""

    def put(self, *path: str, value: Any) -> None:
        at = self.found
        for name in path[:-1]:
            at = at.setdefault(name, {})
        at[path[-1]] = value
        write(self.file, self.found)
        print(", ".join(path), json.dumps(value), flush=True)
        if isinstance(value, dict) and not value.get("failed", UNFIT).startswith(UNFIT):
            self.wrong.append(f"{', '.join(path)}: {value['failed']}")

    def compare(self, sides: dict[str, dict[str, Any]], allowed: dict[str, float]) -> None:
        """Record an error for each side whose relative difference from the fused loss exceeds `allowed`."""
        fused = sides["triton"].get("loss", math.nan)
        self.wrong += [
            f"{side}: a loss of {sides[side]['loss']}, triton: {fused}"
            for side, within in allowed.items()
            if "loss" in sides.get(side, {}) and not abs(sides[side]["loss"] - fused) <= within * abs(fused)
        ]


def rates(record: Record) -> None:
    """Measure all sides of Proxy-Anchor, the largest size and the fused side first."""
    for classes in CLASSES[::-1] if not TINY else CLASSES:
        for batch in BATCHES[::-1]:
            here: dict[str, dict[str, Any]] = {}
            for side in SIDES[::-1]:
                if DEVICE == "cpu" and side == "dense, compiled":
                    continue
                found = here[side] = measured(side, ProxyAnchor(SCALE, MARGIN), batch, classes)
                if "failed" not in found:
                    found["of the matrix rate"] = round(found["tflops"] / record.found["matrix_tflops"], 3)
                record.put("proxy-anchor", f"batch {batch}", f"{classes} classes", side, value=found)
            # The dense formula rounds its similarities to bfloat16.
            record.compare(here, {"chunked": 1e-4, "dense": 1e-2})
    met = record.found["proxy-anchor"][f"batch {BATCHES[-1]}"]
    fused, largest = met[f"{CLASSES[1]} classes"]["triton"], met[f"{CLASSES[2]} classes"]["triton"]
    pairs = [
        (sides["triton"], sides["dense, compiled"])
        for sizes in record.found["proxy-anchor"].values()
        for sides in sizes.values()
        if "ms" in sides.get("dense, compiled", {})
    ]
    taken = largest.get("of proxies and gradient", math.inf)
    record.put("targets", value={
        f"{REACH} TFLOP/s at a batch of {BATCHES[-1]} and {CLASSES[1]} classes": fused.get("tflops", 0) >= REACH,
        f"{CLASSES[2]} classes within {SPARE} of proxies and gradient": taken <= SPARE,
        "never slower than compiled": all(one.get("ms", math.inf) <= other["ms"] for one, other in pairs),
    })  # fmt: skip


def gradients(record: Record) -> None:
    """Measure how much the gradients of the fused side differ from those of chunks, which multiply in float32."""
    grads = []
    for side in ("chunked", "triton"):
        x, y, p = inputs(BATCHES[0], CLASSES[0])
        step_of(side, ProxyAnchor(SCALE, MARGIN), x, y, p)()
        assert x.grad is not None
        assert p.grad is not None
        grads.append((x.grad.float(), p.grad.float()))
    far = [float((one - other).norm() / one.norm()) for one, other in zip(*grads, strict=True)]
    record.put("gradients, distance from chunked", value={"in queries": far[0], "in proxies": far[1]})
    assert max(far) < 2e-2, far


def groups(record: Record) -> None:
    """Measure losses with K = 10 proxies per class.

    For SoftTriple, other libraries build a mask of all pairs of proxies, which has (C K)^2 entries.
    """
    losses: dict[str, Loss] = {"soft-triple": SoftTriple(), "mpa-ap": MPAAP()}
    record.put("ten per class", "mask of all pairs of proxies, GiB", value=round((GROUPS * PER_CLASS) ** 2 / 2**30, 1))
    for name, loss in losses.items():
        for batch, sides in ((BATCHES[0], ("triton", "chunked")), (BATCHES[1], ("triton",))):
            here = {side: measured(side, loss, batch, GROUPS, PER_CLASS) for side in sides}
            for side, found in here.items():
                record.put("ten per class", name, f"batch {batch}", side, value=found)
            record.compare(here, {"chunked": 1e-4})


def others(record: Record) -> None:
    """Measure float32 with products in TF32, as in the trainer, and a loss that sums over the classes.

    The latter is also measured with all similarities kept between the passes, as the formula keeps them.
    """
    classes = CLASSES[1]
    for batch in BATCHES:
        torch.set_float32_matmul_precision("high")
        for name, loss, dtype, near in (
            ("proxy-anchor, float32", ProxyAnchor(SCALE, MARGIN), torch.float32, 1e-2),
            ("norm-softmax", CosFace(SCALE, 0.0), torch.bfloat16, 1e-2),
        ):
            sides = ["triton"] + ["triton, kept"] * isinstance(loss, CosFace) + ["dense, compiled"] * (DEVICE == "cuda")
            here = {side: measured(side, loss, batch, classes, dtype=dtype) for side in sides}
            for side, found in here.items():
                record.put("others", name, f"batch {batch}", f"{classes} classes", side, value=found)
            record.compare(here, {"dense, compiled": near})
        torch.set_float32_matmul_precision("highest")


def curve(record: Record) -> None:
    """Measure time and memory for several numbers of classes."""
    for classes in CURVE:
        for side in ("dense", "chunked", "triton"):
            known = record.found.get("proxy-anchor", {}).get(f"batch {BATCHES[-1]}", {}).get(f"{classes} classes", {})
            found = known.get(side) or measured(side, ProxyAnchor(SCALE, MARGIN), BATCHES[-1], classes)
            record.put("curve", side, str(classes), value=found)


def rows(record: Record) -> None:
    """Measure the fused side with chunks of sizes that it does not choose itself."""
    for count in ROWS:
        found = measured("triton", ProxyAnchor(SCALE, MARGIN), BATCHES[-1], CLASSES[1], rows=count)
        record.put("rows of a chunk", str(count), value=found)


def profile(record: Record) -> None:
    """Record the times of the kernels of a loss that sums over the batch, and of one that sums over the classes."""
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (DEVICE == "cuda")
    field = "self_device_time_total" if DEVICE == "cuda" else "self_cpu_time_total"
    for batch in BATCHES:
        for name, side, loss in (
            ("proxy-anchor", "triton", ProxyAnchor(SCALE, MARGIN)),
            ("norm-softmax", "triton, kept", CosFace(SCALE, 0.0)),
        ):
            step = step_of(side, loss, *inputs(batch, CLASSES[1]))
            step()
            with torch.profiler.profile(activities=kinds) as seen:
                step()
                synchronise()
            spent = {each.key[:80]: round(getattr(each, field) / 1e3, 3) for each in seen.key_averages()}
            longest = dict(sorted(spent.items(), key=lambda each: -each[1])[:12])
            record.put("kernels, ms", name, f"batch {batch}", value=longest | {"all": round(sum(spent.values()), 3)})


def plot(file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = json.loads(file.read_text())
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for side, points in found["curve"].items():
        there = [(int(classes), each) for classes, each in points.items() if "failed" not in each]
        for axis, field in zip(axes, ("ms", "extra_mb"), strict=True):
            axis.plot([one for one, _ in there], [each[field] for _, each in there], marker="o", label=side)
    gradient = [(int(each), int(each) * found["dim"] * 2 / 2**20) for each in found["curve"]["triton"]]
    axes[1].plot(*zip(*gradient, strict=True), color="grey", linestyle=":", label="the gradient of the proxies alone")
    for axis, title in zip(axes, ("ms a step", "MiB beyond embeddings and proxies"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="classes", title=title)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(f"Proxy-Anchor, {found['batches'][-1]} embeddings of {found['dim']} in bfloat16, {found['device']}")
    figure.savefig(file.with_suffix(".png"), dpi=120)


PARTS: dict[str, Callable[[Record], None]] = {
    "rates": rates, "gradients": gradients, "groups": groups, "others": others, "curve": curve, "rows": rows,
    "profile": profile,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS / "losses-cuda.json", help="JSON file to add to")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to check that the benchmark runs")
    options = parser.parse_args()
    if options.plot:
        return plot(options.out)
    if DEVICE == "cpu" and not TINY:
        parser.error("device: got no GPU, expected a GPU, or --tiny")
    begun, record = time.perf_counter(), Record(options.out)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    head = about("losses", device) | {"dim": DIM, "batches": BATCHES, "type": "bfloat16"}
    for name, value in head.items():
        record.put(name, value=value)
    if "matrix_tflops" not in record.found or "rates" in options.parts:  # the rates are compared with it
        record.put("matrix_tflops", value=matrix_rate())
    for part in options.parts:
        PARTS[part](record)
    record.put("clock_mhz_during", value=clock_mhz())
    record.put("seconds", value=round(time.perf_counter() - begun, 1))
    assert not record.wrong, "\n".join(record.wrong)


if __name__ == "__main__":
    main()
