"""The proxies of a run: the vectors of its training classes, as points or as Gaussians, and their uncertainty."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from proxymetric.core.capabilities import EstimatesUncertainty, HasClassProxies
from proxymetric.models.place import Place, RunFolder, place_of
from proxymetric.models.run_folder import model_file, model_folder, read_run

MAX_CLASSES = 100_000
"""the proxies of runs with more classes are not read: nobody looks at them one by one"""


class RunProxies(NamedTuple):
    """The proxies of a run, not normalised."""

    names: list[str]
    """P names of classes; a class with several proxies comes several times"""
    vectors: Tensor
    """(P, D); of Gaussian proxies (VCPA), the means"""
    sigma: Tensor | None
    """(P, D) standard deviations of Gaussian proxies; None for points"""


def load_proxies(run: str | Path | Place, dim: int, which: str = "best") -> RunProxies | None:
    """Read the proxies of a run.

    Args:
        run: folder of a run; slim files and shared models have no proxies.
        dim: dimensions of the vectors.
        which: the model whose proxies are read, as for `load`.

    Returns:
        The proxies; None for a method without proxies, or for a run whose proxies are not kept in its checkpoint.

    Raises:
        ValueError: the run or its checkpoint is missing or damaged.
    """
    names, sources = _sources(run, dim, which)
    proxies = [source.class_proxies() for source in sources]
    if len(proxies) != 1 or proxies[0].vectors.shape[1] != dim:
        return None
    vectors, labels, sigma = proxies[0]
    return RunProxies([names[label] for label in labels.tolist()], vectors.float(), sigma)


def load_uncertainty(run: str | Path | Place, dim: int, which: str = "best") -> dict[str, float]:
    """Read how uncertain the method of a run is about each training class.

    Args:
        run: folder of a run.
        dim: dimensions of the vectors.
        which: the model whose proxies are read, as for `load`.

    Returns:
        Class name -> uncertainty; empty for a method without an estimate.

    Raises:
        ValueError: the run or its checkpoint is missing or damaged.
    """
    names, sources = _sources(run, dim, which)
    for source in sources:
        if isinstance(source, EstimatesUncertainty):
            return dict(zip(names, source.uncertainty().double().cpu().tolist(), strict=True))
    return {}


def _sources(place: str | Path | Place, dim: int, which: str) -> tuple[list[str], list[HasClassProxies]]:
    """The names of the training classes, and the sources whose proxies the checkpoint has."""
    from proxymetric.papers import method
    from proxymetric.papers.class_counts import with_class_counts
    from proxymetric.system.checkpoint import Checkpoint

    parsed = place_of(place)
    if not isinstance(parsed, RunFolder):
        return [], []
    run = model_folder(parsed.path, which)
    which = which if run == parsed.path else "best"
    description = read_run(run)
    names, recipe = description["classes"], description["recipe"]
    if not 0 < len(names) <= MAX_CLASSES:
        return names, []
    # The proxies do not depend on the numbers of images.
    arguments = with_class_counts(recipe["method"], recipe["loss"], [1] * len(names))
    criterion = method(recipe["method"], classes=len(names), dim=dim, **arguments)
    stored = Checkpoint.read(model_file(run, which)).under("criterion.")
    sources = [source for path, module in criterion.named_modules() if (source := _read(module, path, stored))]
    return names, sources


def _read(module: nn.Module, path: str, stored: dict[str, Tensor]) -> HasClassProxies | None:
    """Load the tensors of a source; None if it has no proxies, or the checkpoint does not have all of them."""
    if not isinstance(module, HasClassProxies):
        return None
    tensors = {name: stored[f"{path}.{name}"] for name in module.state_dict() if f"{path}.{name}" in stored}
    if any(value.shape != tensors.get(name, value).shape for name, value in module.state_dict().items()):
        return None
    if not tensors.keys() >= {name for name, _ in module.named_parameters()}:
        return None
    module.load_state_dict(tensors, strict=False)
    return module
