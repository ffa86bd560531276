"""The losses that pytorch-metric-learning has too: the same loss in both libraries, and its formula in plain torch.

`cell` measures one loss at one size; `build` gives the sides of a comparison as candidates that have the same
embeddings, labels and proxies. "ours" is the criterion of `pm.method` with its `commit`, "ours, compiled" the same
under `torch.compile`; "peer" is the loss of the peer as its README calls it, without a regulariser; "compiled" is the
formula under `torch.compile`, on a matrix of all pairs. A step computes the loss and its gradients for embeddings and
proxies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from common import Candidate, interleaved, ratios
from formulas import (
    PER_CLASS,
    Formula,
    arcface,
    circle,
    contrastive,
    cosface,
    margin_contrastive,
    multi_similarity,
    proxy_anchor,
    soft_triple,
    softmax,
    supcon,
    triplet,
)
from torch import Tensor, nn

PER_CLASS_IN_BATCH = 4
"""samples of a class in a batch of the pair losses"""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""largest relative difference of losses and of gradients between the libraries; in bfloat16 the peer also computes
exponents and sums in 16 bits"""


class Pair(NamedTuple):
    """A loss in both libraries. A pair loss has no proxies: the formula ignores them."""

    method: str
    arguments: dict[str, Any]
    peer: str
    peer_arguments: dict[str, Any]
    formula: Formula
    per_class: int = 1
    has_proxies: bool = True
    distance: str | None = None
    """the peer's distance; None: its default"""
    reducer: str | None = None
    """the peer's reducer; None: its default"""
    miner: tuple[str, dict[str, Any]] | None = None
    """the peer's miner and its arguments"""
    divided_by_batch: bool = False
    """the loss of the peer is the sum where ours is divided by the batch"""


PAIRS = {
    "proxy-anchor": Pair("proxy-anchor", {}, "ProxyAnchorLoss", {"margin": 0.1, "alpha": 32}, proxy_anchor),
    # The peer's ProxyNCALoss keeps the proxy of the sample's class in the sum: it is Proxy-NCA++. It has no Proxy-NCA.
    "proxy-nca++": Pair("proxy-nca++", {"temperature": 1 / 18}, "ProxyNCALoss", {"softmax_scale": 9}, softmax(18)),
    "arcface": Pair("arcface", {}, "ArcFaceLoss", {"margin": math.degrees(0.5), "scale": 64}, arcface),
    "cosface": Pair("cosface", {}, "CosFaceLoss", {"margin": 0.35, "scale": 64}, cosface),
    "norm-softmax": Pair("norm-softmax", {}, "NormalizedSoftmaxLoss", {"temperature": 0.05}, softmax(20)),
    "soft-triple": Pair(
        "soft-triple", {"per_class": PER_CLASS, "tau": 0.0}, "SoftTripleLoss",
        {"centers_per_class": PER_CLASS, "la": 20, "gamma": 0.1, "margin": 0.01}, soft_triple, per_class=PER_CLASS,
    ),
    "triplet": Pair("triplet", {}, "TripletMarginLoss", {"margin": 0.0961}, triplet, has_proxies=False),
    "multi-similarity": Pair(
        "multi-similarity", {}, "MultiSimilarityLoss", {"alpha": 2, "beta": 40, "base": 0.5}, multi_similarity(True),
        has_proxies=False, miner=("MultiSimilarityMiner", {"epsilon": 0.1}),
    ),
    "multi-similarity, all pairs": Pair(
        "multi-similarity", {"epsilon": None}, "MultiSimilarityLoss", {"alpha": 2, "beta": 40, "base": 0.5},
        multi_similarity(False), has_proxies=False,
    ),
    "contrastive": Pair(
        "contrastive", {"margin": 0.0}, "ContrastiveLoss", {"pos_margin": 1, "neg_margin": 0}, contrastive,
        has_proxies=False, distance="CosineSimilarity", reducer="SumReducer", divided_by_batch=True,
    ),
    "margin-contrastive": Pair(
        "margin-contrastive", {"margin": 1.0}, "ContrastiveLoss", {"pos_margin": 0, "neg_margin": 1},
        margin_contrastive, has_proxies=False,
    ),
    "circle": Pair("circle", {}, "CircleLoss", {"m": 0.4, "gamma": 80}, circle, has_proxies=False),
    "supcon": Pair("supcon", {}, "SupConLoss", {"temperature": 0.1}, supcon, has_proxies=False),
}  # fmt: skip


class Sides(NamedTuple):
    """What `build` makes."""

    candidates: dict[str, Candidate]
    gradients: dict[str, Callable[[], list[Tensor]]]
    """side -> the gradients of its last step, for embeddings and proxies"""


def inputs(pair: Pair, batch: int, classes: int, dim: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return embeddings and labels. Pair losses have samples near the centre of their class, several of each."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(batch, dim, generator=generator, device=device)
    if pair.has_proxies:
        return x.to(dtype), torch.randint(classes, (batch,), generator=generator, device=device)
    y = torch.arange(batch, device=device) // PER_CLASS_IN_BATCH
    y = y[torch.randperm(batch, generator=generator, device=device)]
    centres = torch.randn(batch, dim, generator=generator, device=device)
    # A large common part and a small one of the class: positives and negatives are both hard, and all terms count.
    return (centres[0] + 0.25 * centres[y] + x).to(dtype), y


def peer_of(pair: Pair, classes: int, dim: int) -> nn.Module:
    """Return the loss of the peer."""
    import pytorch_metric_learning.losses as peers
    from pytorch_metric_learning import distances as peer_distances
    from pytorch_metric_learning import reducers

    arguments = dict(pair.peer_arguments)
    if pair.distance is not None:
        arguments["distance"] = getattr(peer_distances, pair.distance)()
    if pair.reducer is not None:
        arguments["reducer"] = getattr(reducers, pair.reducer)()
    return getattr(peers, pair.peer)(*((classes, dim) if pair.has_proxies else ()), **arguments)


def proxies_of(module: nn.Module) -> Tensor:
    """Return the proxies (rows, dim) of the peer's loss: some of its losses store them transposed."""
    proxies = getattr(module, "proxies", None)
    if proxies is not None:
        return proxies
    return (module.W if hasattr(module, "W") else module.fc).T


def build(
    pair: Pair, batch: int, classes: int, dim: int, device: str, dtype: torch.dtype, sides: tuple[str, ...]
) -> Sides:
    """Return candidates with the same embeddings, labels and proxies.

    Args:
        pair: the loss.
        batch: number of embeddings, B.
        classes: number of classes, C; pair losses ignore it.
        dim: width of the embeddings, D.
        device: "cpu" or "cuda".
        dtype: type of embeddings and proxies on every side.
        sides: some of "ours", "ours, compiled", "peer", "compiled", "formula" (the formula in eager mode).
    """
    x, y = inputs(pair, batch, classes, dim, device, dtype)
    candidates, gradients = {}, {}
    for side in sides:
        generator = torch.Generator(device).manual_seed(1)  # the same proxies on every side
        candidates[side], gradients[side] = _side(side, pair, x.clone().requires_grad_(), y, classes, generator)
    return Sides(candidates, gradients)


def _side(
    side: str, pair: Pair, x: Tensor, y: Tensor, classes: int, generator: torch.Generator
) -> tuple[Candidate, Callable[[], list[Tensor]]]:
    rows, dim, device, dtype = classes * pair.per_class, x.shape[1], x.device, x.dtype
    commit: Callable[[], None] | None = None
    call: Callable[[Tensor, Tensor], Tensor]
    vectors: Tensor | None = None
    with torch.device(device):
        if side.startswith("ours"):
            import proxymetric as pm

            criterion = pm.method(pair.method, classes=max(classes, 2), dim=dim, **pair.arguments).to(device, dtype)
            leaves = list(criterion.parameters())
            vectors = criterion.objective.source.vectors if pair.has_proxies else None
            call = torch.compile(criterion, dynamic=False) if side == "ours, compiled" else criterion
            commit = criterion.commit
        elif side == "peer":
            module = peer_of(pair, classes, dim).to(device, dtype)
            leaves = list(module.parameters())
            vectors = proxies_of(module) if pair.has_proxies else None
            call = module
            if pair.miner is not None:
                from pytorch_metric_learning import miners

                miner = getattr(miners, pair.miner[0])(**pair.miner[1])
                call = lambda x, y: module(x, y, miner(x, y))  # noqa: E731
        else:
            own = torch.empty(rows if pair.has_proxies else 0, dim, dtype=dtype).requires_grad_()
            leaves, vectors = [own] if pair.has_proxies else [], own
            formula = torch.compile(pair.formula, dynamic=False) if side == "compiled" else pair.formula
            call = lambda x, y: formula(x, y, own)  # noqa: E731
    if pair.has_proxies:
        assert vectors is not None
        with torch.no_grad():
            for start in range(0, rows, 2**18):
                some = vectors[start : start + 2**18]
                some.copy_(torch.randn(len(some), dim, generator=generator, device=device))

    def step() -> Tensor:
        x.grad = None
        for leaf in leaves:
            leaf.grad = None
        loss = call(x, y)
        loss.backward()
        if commit is not None:
            commit()
        return loss

    def clear() -> None:
        for leaf in (x, *leaves):
            leaf.grad = None

    def gradients() -> list[Tensor]:
        assert x.grad is not None
        found = [x.grad]
        for leaf in leaves:
            assert leaf.grad is not None
            # (rows, dim) on every side
            found.append(leaf.grad.T if leaf.shape != (rows, dim) or _is_transposed(side, pair) else leaf.grad)
        return found

    return Candidate(step, clear), gradients


def _is_transposed(side: str, pair: Pair) -> bool:
    return side == "peer" and pair.peer not in ("ProxyAnchorLoss", "ProxyNCALoss")


def distance(one: Tensor, other: Tensor, factor: float) -> float:
    """Return the length of `one - factor * other` relative to that of `one`, in parts, without a copy of either."""
    far = length = 0.0
    for some, same in zip(one.split(2**18), other.split(2**18), strict=True):
        far += float((some.float() - factor * same.float()).square().sum(dtype=torch.float64))
        length += float(some.float().square().sum(dtype=torch.float64))
    return math.sqrt(far / length)


def differences(sides: Sides, batch: int, pair: Pair) -> dict[str, Any]:
    """Run a step of every side; return the relative differences of losses and gradients from "ours".

    The gradients' difference is the length of the difference relative to the length of our gradient.
    """
    found: dict[str, Any] = {}
    mine = mine_grads = None
    for side, candidate in sides.candidates.items():
        factor = 1 / batch if side == "peer" and pair.divided_by_batch else 1.0
        loss = factor * float(candidate.step().detach())
        grads = sides.gradients[side]()
        if side == "ours":
            mine, mine_grads = loss, grads
            found["loss"] = loss
            continue
        assert mine is not None
        assert mine_grads is not None
        relative = [distance(one, other, factor) for one, other in zip(mine_grads, grads, strict=True)]
        found[side] = {"loss": abs(mine - loss) / max(abs(mine), 1e-12), "gradients": relative}
        candidate.clear()
    sides.candidates["ours"].clear()
    return found


def cell(
    pair: Pair,
    batch: int,
    classes: int,
    dim: int,
    device: str,
    dtype: torch.dtype,
    sides: tuple[str, ...],
    *,
    cpu: bool = False,
    **timing: Any,
) -> dict[str, Any]:
    """Compare the values of the sides, then their times; return the measurements, or why there are none.

    Args:
        pair: the loss.
        batch: number of embeddings, B.
        classes: number of classes, C; 0 for pair losses.
        dim: width of the embeddings, D.
        device: "cpu" or "cuda".
        dtype: type of embeddings and proxies on every side.
        sides: see `build`; "ours" and "peer" at least.
        cpu: whether the ratios are those of CPU times instead of wall-clock times.
        timing: arguments of `common.interleaved`.
    """
    if "compiled" in sides:
        torch._dynamo.reset()
    try:
        built = build(pair, batch, classes, dim, device, dtype, sides)
        found: dict[str, Any] = {"differences": differences(built, batch, pair)}
        for side in sides[1:]:
            values = found["differences"][side]
            if not max([values["loss"], *values["gradients"]]) <= TOLERANCE[dtype]:
                return found | {"failed": f"values differ from {side}: {values}, expected at most {TOLERANCE[dtype]}"}
        timings = interleaved(built.candidates, device, **timing)
    except torch.OutOfMemoryError:
        return {"skipped": "does not fit: out of memory"}
    except NotImplementedError as error:  # the peer's distances have no kernel for bfloat16
        return {"skipped": f"the peer: {error}"}
    except (RuntimeError, ValueError, AssertionError) as error:  # the other cells are still measured
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    found |= {side: each.record() for side, each in timings.items()}
    found["of the peer's"] = ratios(timings["ours"], timings["peer"], cpu=cpu)
    if "compiled" in timings:
        found["of the compiled formula's"] = ratios(timings["ours"], timings["compiled"], cpu=cpu)
    if "ours, compiled" in timings:
        both = timings["ours, compiled"], timings["compiled"]
        found["compiled, of the compiled formula's"] = ratios(*both, cpu=cpu)
    return found


def size_name(batch: int, classes: int) -> str:
    """Return the name of a size: "B 128, C 100", or "B 128" for pair losses."""
    return f"B {batch}, C {classes}" if classes else f"B {batch}"


def text(found: dict[str, Any] | None, against: str = "of the peer's", side: str = "peer") -> str:
    """Return a cell as text: time ours / theirs, the other side's milliseconds, and the ratio of the memory."""
    if found is None or against not in found:
        return "" if found is None else "skipped" if "skipped" in found else "FAILED" if "failed" in found else ""
    memory = found[against]["memory"]
    ratio = f"{found[against]['time']['median']:.2f} ({found[side]['ms']['median']:.2f})"
    return ratio if memory is None else f"{ratio} {memory:.2f}"


def table(cells: dict[str, Any], title: str, against: str = "of the peer's", side: str = "peer") -> str:
    """Return the cells of all losses, loss -> size -> cell, as text."""
    sizes = list(dict.fromkeys(size for by_size in cells.values() for size in by_size))
    width = max([len(name) for name in cells] + [12])
    lines = [f"{title}: time {against} (its ms), memory {against}"]
    for part in ([size for size in sizes if "C" in size], [size for size in sizes if "C" not in size]):
        named = {name: by_size for name, by_size in cells.items() if any(size in by_size for size in part)}
        if not named:
            continue
        lines.append(" " * width + "".join(f"  {size:>22}" for size in part))
        for name, by_size in named.items():
            texts = (text(by_size.get(size), against, side) for size in part)
            lines.append(f"{name:<{width}}" + "".join(f"  {each:>22}" for each in texts))
    return "\n".join(lines)
