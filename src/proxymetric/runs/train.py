"""`train`: from arguments and a recipe to a finished run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from proxymetric.arguments.own_code import trusting
from proxymetric.data.own_transforms import name_of
from proxymetric.data.views import TrainView
from proxymetric.runs import folder as folders
from proxymetric.runs import recipe as recipes
from proxymetric.runs import same_everywhere
from proxymetric.runs.assemble import train_view
from proxymetric.runs.auto_method import AUTO, chooses_by_default, without_auto
from proxymetric.runs.defaults import earlier_schedule
from proxymetric.runs.flags import FLAGS
from proxymetric.runs.session import Run, RunSession
from proxymetric.system.device import pick_device
from proxymetric.system.files import printable
from proxymetric.system.precision import training_precision
from proxymetric.system.watcher import Silent, Watcher
from proxymetric.training.process_group import ProcessGroup, restarts


def train(
    data: str | Path | None = None,
    *,
    recipe: str | Path | None = None,
    method: str | None = None,
    backbone: str | None = None,
    tuning: str | dict[str, Any] | None = None,
    weights: str | Path | None = None,
    out: str | Path | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    size: int | None = None,
    transform: str | Callable[[Any], Any] | None = None,
    dim: int | None = None,
    nested: Sequence[int] | None = None,
    lr: float | None = None,
    seed: int | None = None,
    cache: str | None = None,
    device: str | None = None,
    frozen: bool | None = None,
    refit: bool | None = None,
    start: str | None = None,
    whiten: bool | None = None,
    protocol: str | None = None,
    settings: Iterable[str] | Mapping[str, Any] = (),
    resume: bool = False,
    overwrite: bool = False,
    report: bool = True,
    score_test: bool = True,
    trust_code: bool = False,
    watcher: Watcher | None = None,
) -> Run:
    """Train an embedding on labelled images and score it on classes never seen in training.

    Arguments that are None leave the value of the recipe. The arguments win over the recipe; `settings` wins over both.

    Args:
        data: a folder of class folders, a CSV of file and class, a benchmark's folder, "glyphs" or "digits".
        recipe: the name of a shipped recipe, such as "cub/proxy-anchor", or a TOML file.
        method: name of the method, see `proxymetric.methods`; "auto" compares some on features of the known classes,
            from six classes on, and takes one that needs no training unless another is clearly better, see
            `proxymetric.runs.auto_method`; "whitening", "lda" and "untrained" take no step, the head is computed from
            frozen features (`closed_forms`).
        backbone: any timm name, "bn_inception" or "small".
        tuning: which parameters of the backbone are trained: a name such as "full" or "vpt+bitfit", or a table with a
            name and arguments.
        weights: a safetensors file with the backbone's weights, instead of the hub's.
        out: folder of the run, `runs/<data>-<method>` by default.
        epochs: passes over the training images.
        batch: images in a forward pass.
        size: side of the images in pixels.
        transform: your own training views instead of crop and flip: a transform of a PIL image, such as a pipeline of
            `torchvision.transforms.v2` without normalisation, or "module:function" (`data.TrainView`). The random
            numbers of torch, NumPy and Python that it draws are seeded for each image, so that a run can be resumed.
        dim: dimensions of the embedding.
        nested: dimensions that the vectors can be cut to afterwards, such as [64, 128, 256, 512]; the last one is the
            dimension of the embedding (`losses.Nested`).
        lr: learning rate of the encoder.
        seed: seed of all random numbers.
        cache: where decoded images are kept: "auto", "none", "memory" or "device".
        device: "auto", "cpu", "cuda" or "cuda:0".
        frozen: train head and proxies on cached features of the backbone.
        refit: afterwards train on all classes for the chosen number of epochs.
        start: "whitening" or "lda" computes the head from the features of the backbone before training.
        whiten: afterwards put the whitening of the trained vectors behind the head, if it scores higher on the held-out
            classes; with `resume` also for a finished run.
        protocol: which classes choose the epoch, see `proxymetric.runs.protocol`; `proxymetric.runs.mlrc` trains folds.
        settings: any keys of the recipe: `{"loss.margin": 0.2}` or `["loss.margin=0.2"]`.
        resume: continue the run in the folder `out`.
        overwrite: replace the run in the folder `out`.
        report: write the page `report.html`.
        score_test: score the test classes at the end. False: the scores are those of the held-out classes, and no image
            of the test classes is read, as a search for settings needs it.
        trust_code: import code ("module:function") that only a file names: the recipe, or the `run.json` of the run
            that is continued. Code that an argument names is always imported.
        watcher: receives messages and progress; None draws a progress bar in the terminal,
            `proxymetric.system.watcher.Silent()` prints nothing.

    Returns:
        The finished run.

    Raises:
        ValueError: an argument, the recipe, the data or the folder is wrong.

    Example:
        >>> run = train("digits", backbone="small", epochs=1, out="runs/digits")    # doctest: +SKIP
        >>> run.scores["R@1"]                                                       # doctest: +SKIP
    """
    settings = settings if isinstance(settings, Mapping) else tuple(settings)
    flags: dict[str, Any] = {
        "data": data,
        "method": method,
        "backbone": backbone,
        "tuning": tuning,
        "weights": weights,
        "epochs": epochs,
        "batch": batch,
        "size": size,
        "transform": transform if transform is None or isinstance(transform, str) else name_of(transform),
        "dim": dim,
        "nested": nested,
        "lr": lr,
        "seed": seed,
        "cache": cache,
        "device": device,
        "frozen": frozen,
        "refit": refit,
        "start": start,
        "whiten": whiten,
        "protocol": protocol,
    }
    raw, typed = read_recipe(recipe=recipe, settings=settings, **flags), read_recipe(settings=settings, **flags)
    with trusting(typed, everything=trust_code):
        return _train(raw, out, resume, overwrite, report, score_test, watcher)


def _train(
    raw: dict[str, Any],
    out: str | Path | None,
    resume: bool,
    overwrite: bool,
    report: bool,
    score_test: bool,
    watcher: Watcher | None,
) -> Run:
    """Train from unchecked tables."""
    if chooses_by_default(raw):
        raw = raw | {"method": AUTO}
    folder = folders.default_folder(raw) if out is None else Path(out)
    if resume and out is not None:
        folders.check_spelling(folder)
    chooses = raw.get("method") == AUTO
    if chooses:
        raw = without_auto(raw)
    if printable(str(folder)) != str(folder):
        raise ValueError(
            f"out: got {printable(str(folder))}, a name that is not UTF-8; expected a name in UTF-8, because "
            "safetensors cannot open files with other names"
        )
    if restarts():
        # torchrun started the processes again: they continue the run, whatever flags the first command had.
        resume, overwrite = True, False
    with ProcessGroup.joined() as world, contextlib.ExitStack() as locks:
        earlier_run = world.from_first(lambda: folders.claim(folder, resume, overwrite))
        if earlier_run is not None:
            overrides = {key: value for key, value in raw.items() if key != "method" or not chooses}
            longer = "epochs" in overrides.get("train", {})
            begun = earlier_schedule(earlier_run["recipe"]) if longer else {}
            raw = recipes.merged(begun, earlier_run["said"], overrides)
        checked = recipes.check(raw)
        same_everywhere.check_recipe(world, checked)
        _try_view(train_view(checked))
        if earlier_run is not None:
            folders.check_same_recipe(checked, earlier_run, folder)
        listener = (watcher or _terminal()) if world.first else Silent()
        earlier_run = world.from_first(lambda: folders.hold(locks, folder, resume, overwrite, listener))
        same_everywhere.check_folder(world, folder)
        if resume and earlier_run is None:
            listener.say(f"{folder} holds no run to continue: starting a new one")
        try:
            with training_precision(checked.train.deterministic, pick_device(checked.train.device)):
                return RunSession(
                    checked, folder, listener, earlier_run, overwrite, world, report, chooses, score_test
                ).run()  # fmt: skip
        finally:
            listener.close()


def read_recipe(
    *, recipe: str | Path | None = None, settings: Iterable[str] | Mapping[str, Any] = (), **flags: Any
) -> dict[str, Any]:
    """Merge a recipe, the arguments of `train` and settings into unchecked tables; later ones win.

    Args:
        recipe: name or file of a recipe.
        settings: as for `train`.
        **flags: arguments of `train` that stand for keys of the recipe; others and None are left out.

    Example:
        >>> read_recipe(epochs=3, settings=["loss.margin=0.2"])
        {'train': {'epochs': 3}, 'loss': {'margin': 0.2}}
    """
    overrides = {FLAGS[name]: value for name, value in flags.items() if name in FLAGS and value is not None}
    overrides = {key: str(value) if isinstance(value, Path) else value for key, value in overrides.items()}
    tables = {} if recipe is None else recipes.load(recipe)
    return recipes.merged(tables, recipes.settings(overrides), recipes.settings(settings))


def _try_view(view: TrainView) -> None:
    """Refuse a transform of your own that does not work, before the images are opened."""
    if view.transform is not None:
        view(Image.new("RGB", (2 * view.size, 2 * view.size), "grey"), 0)


def _terminal() -> Watcher:
    from proxymetric.system.terminal import Terminal

    return Terminal()
