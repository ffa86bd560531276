"""Recipes: a TOML file, flags and settings become one checked description of a run.

A recipe has five tables, and each is the signature of something in the code:

=============  =====================================================================
table          what its keys are
=============  =====================================================================
`[data]`       fields of `DataOptions`: where the images are and how they are split
`[view]`       arguments of `data.TrainView`: size, crop, flip; or `name`: a paper's
`[encoder]`    arguments of `encoders.build`: backbone, dim, pooling, weights, ...
`[loss]`       arguments of the method: scale, margin, per_class, ...
`[train]`      fields of `TrainOptions`: epochs, rates, schedule, ...
=============  =====================================================================

`method`, `protocol` and `seed` stand above them. An unknown key is an error that names the nearest right one.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxymetric.protocol import PROTOCOLS

TOP = ("method", "protocol", "seed")
TABLES = ("data", "view", "encoder", "loss", "train")
CACHES = ("auto", "none", "memory", "device")


@dataclass(frozen=True)
class DataOptions:
    """Where the images are and which classes are for what.

    path: a folder of class folders, a CSV of file and class, a benchmark's folder, or "glyphs" / "digits".
    layout: "auto", "folder", "csv", or a benchmark (`data.open_data` lists them). validation: fraction of the training
    classes held out to choose the number of epochs, or a fold of them such as "1/4". test: "auto" (the benchmark's own
    test classes; none for other folders), "none", or a fraction of the classes. cache: "none" decodes images as they
    are needed, "memory" keeps them decoded, "device" keeps them on the accelerator and augments there; "auto" is
    "device" for the embedded sets and "none" for files. workers: processes that decode (-1: as many as pay here).
    fraction: share of each training class's images that are used, at least two, drawn by the seed. wrong_labels: share
    of the training images that are given the label of another class, drawn by the seed; for studies of robustness.
    """

    path: str = ""
    layout: str = "auto"
    validation: float | str = 0.2
    test: str | float = "auto"
    cache: str = "auto"
    workers: int = -1
    fraction: float = 1.0
    wrong_labels: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"data.fraction: got {self.fraction}, expected a share above 0 and at most 1")
        if not 0 <= self.wrong_labels < 1:
            raise ValueError(f"data.wrong_labels: got {self.wrong_labels}, expected a share of at least 0 and below 1")
        if self.cache not in CACHES:
            raise ValueError(f"data.cache: got {self.cache!r}{_nearest(self.cache, CACHES)}")
        if self.workers < -1:
            raise ValueError(
                f"data.workers: got {self.workers}, expected a number of processes, or -1 to leave it to us"
            )


@dataclass(frozen=True)
class TrainOptions:
    """How a run trains.

    batch, accumulate: images in a forward pass, and forward passes in a step. per_class: images of a class in a batch
    (None: what the method advises, 0: random batches). optimizer: "adamw", "adam", "sgd"; proxy_optimizer:
    "rowwise-adagrad", one number of state for each proxy (None: as optimizer). lr: the encoder's rate (None: 1e-4, or
    1e-3 with frozen). proxy_lr: the proxies' (None: 100 x lr). warmup: epochs in which only head and proxies move.
    decay: "none", "step" (x decay_by every decay_every epochs) or "cosine" (over decay_every epochs, None: all).
    clip_value, clip_norm: gradient clipping. amp: "auto" (bfloat16 on a GPU that has it), "bf16", "fp16", "off".
    metrics: what an evaluation computes; monitor: the one that chooses the best. evaluate_every: epochs from one
    evaluation to the next. evaluate_steps: optimiser steps from one to the next instead, also in the middle of an epoch
    (None: by epochs); in any case the end of training is evaluated. patience: evaluations without a better one before
    training stops (None: never). save_every: steps between checkpoints. frozen: train head and proxies on cached
    features of the backbone. refit: afterwards train on all classes for the number of epochs that the held-out ones
    chose. deterministic: bit-equal runs on a GPU too. compile: have torch.compile make the backbone's training steps,
    and record them on a GPU: the first ones take a minute, the others less time. shard: each of several processes holds
    the proxies of a part of the classes, and their optimiser state. parallel: how several processes train the encoder:
    "ddp" (each holds all of it) or "fsdp" (each holds a part of its parameters and of their optimiser state, with
    FSDP2; without warmup, frozen, compile, fp16). track: "tensorboard" writes the curves to the run's
    folder `tensorboard` as well (needs the extra `track`).
    """

    epochs: int = 40
    batch: int = 128
    accumulate: int = 1
    per_class: int | None = None
    optimizer: str = "adamw"
    proxy_optimizer: str | None = None
    lr: float | None = None
    proxy_lr: float | None = None
    weight_decay: float = 1e-4
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: int = 1
    decay: str = "step"
    decay_every: int | None = 10
    decay_by: float = 0.5
    clip_value: float | None = 10.0
    clip_norm: float | None = None
    amp: str = "auto"
    metrics: tuple[str, ...] = ("R@1", "R@2", "R@4", "R@8", "P@R", "MAP@R", "nDCG@8")
    monitor: str = "MAP@R"
    evaluate_every: int = 1
    evaluate_steps: int | None = None
    patience: int | None = 10
    save_every: int = 200
    frozen: bool = False
    refit: bool = False
    deterministic: bool = False
    compile: bool = False
    shard: bool = False
    parallel: str = "ddp"
    device: str = "auto"
    track: str | None = None

    def __post_init__(self) -> None:
        counts = (
            "epochs", "batch", "accumulate", "evaluate_every", "evaluate_steps", "save_every", "decay_every", "patience"
        )  # fmt: skip
        amounts = ("lr", "proxy_lr", "weight_decay", "warmup", "per_class")
        for least, names in ((1, counts), (0, amounts)):
            for name in names:
                value = getattr(self, name)
                if value is not None and not least <= value < math.inf:
                    raise ValueError(f"train.{name}: got {value}, expected at least {least}")
        for name in ("decay_by", "clip_value", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"train.{name}: got {value}, expected more than 0")
        for name, values in (("momentum", (self.momentum,)), ("betas", self.betas)):
            if not all(0 <= value < 1 for value in values):
                raise ValueError(f"train.{name}: got {getattr(self, name)}, expected at least 0 and less than 1")
        for name, known in (
            ("optimizer", ("adamw", "adam", "sgd")),
            ("proxy_optimizer", (None, "rowwise-adagrad")),
            ("decay", ("none", "step", "cosine")),
            ("amp", ("auto", "bf16", "fp16", "off")),
            ("parallel", ("ddp", "fsdp")),
            ("track", (None, "tensorboard")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"train.{name}: got {getattr(self, name)!r}, expected one of {', '.join(map(str, known))}"
                )
        if self.monitor not in self.metrics:
            raise ValueError(
                f"train.monitor: {self.monitor!r} is not among train.metrics{_nearest(self.monitor, self.metrics)}"
            )


@dataclass(frozen=True)
class Recipe:
    """A checked description of a run, complete with defaults."""

    method: str
    protocol: str
    seed: int
    data: DataOptions
    view: dict[str, Any]
    encoder: dict[str, Any]
    loss: dict[str, Any]
    train: TrainOptions
    changed: dict[str, Any] = field(default_factory=dict, compare=False)
    """only what was said, not the defaults: what a run's folder shows first"""

    def as_dict(self) -> dict[str, Any]:
        """The whole recipe as JSON-able tables."""
        content = dataclasses.asdict(self)
        del content["changed"]
        return content


def load(path: str | Path) -> dict[str, Any]:
    """A TOML recipe as tables, not checked yet."""
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], 1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ValueError(f"recipe: there is no file {path}{hint}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"recipe: {path} is not valid TOML: {error}") from None


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers win, table by table and key by key.

    >>> merged({"seed": 1, "loss": {"margin": 0.1, "scale": 32}}, {"loss": {"margin": 0.2}})
    {'seed': 1, 'loss': {'margin': 0.2, 'scale': 32}}
    >>> merged({"encoder": {"tuning": "vpt"}}, settings(["encoder.tuning.prompts=5"]))
    {'encoder': {'tuning': {'name': 'vpt', 'prompts': 5}}}
    """
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            before = result.get(key, {})
            if isinstance(value, Mapping) != isinstance(before, Mapping) and before != {}:
                raise ValueError(f"{key}: got {before!r} and {value!r}, expected a table or a value, not both")
            result[key] = _laid_over(before, value) if isinstance(value, Mapping) else value
    return result


class More(dict[str, Any]):
    """Keys for a value that is a table, or a word that stands for one: `encoder.tuning.prompts=20`."""


WORDS = {"base": "method"}
"""values that may be a word or a table -> the key of the table that the word is; of others "name\""""


def _laid_over(before: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """A table over another, key by key; `More` adds to the value that is there."""
    result = dict(before)
    for key, value in table.items():
        there = result.get(key)
        if isinstance(value, More) and there is not None:
            known = there if isinstance(there, dict) else {WORDS.get(key, "name"): there}
            value = type(known)(known | value)  # more still, where nothing but keys was said
        result[key] = value
    return result


def settings(pairs: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """`table.key=value` texts (or a mapping of them) as tables; values are read as TOML, else as plain text.

    A key of a key's own table has one dot more: `encoder.tuning.prompts=20`.

    >>> settings(["loss.margin=0.2", "encoder.backbone=resnet50", "seed=3"])
    {'loss': {'margin': 0.2}, 'encoder': {'backbone': 'resnet50'}, 'seed': 3}
    """
    result: dict[str, Any] = {}
    if not isinstance(pairs, Mapping):
        texts = list(pairs)
        for text in texts:
            if "=" not in text:
                raise ValueError(f"--set: got {text!r}, expected table.key=value, such as loss.margin=0.2")
        pairs = {key.strip(): _value(text.strip()) for key, _, text in (text.partition("=") for text in texts)}
    for key, value in pairs.items():
        table, *rest = key.split(".", 2)
        if len(rest) == 2:
            value = More({rest[1]: value})
        result = merged(result, {table: {rest[0]: value} if rest else value})
    return result


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def check(raw: Mapping[str, Any]) -> Recipe:
    """Check every key against the signature it stands for, and fill in the defaults."""
    from proxymetric.data.views import TrainView, named_view
    from proxymetric.encoders import TUNINGS, build
    from proxymetric.encoders.needs import Needs
    from proxymetric.encoders.tuning import complete_tuning
    from proxymetric.metrics import names
    from proxymetric.papers import lookup, needs

    for name, table in raw.items():
        if name in TABLES and not isinstance(table, Mapping):
            raise ValueError(f"{name}: got {table!r}, expected a table of keys: {name}.KEY=VALUE")
    tables: dict[str, dict[str, Any]] = {name: dict(raw.get(name, {})) for name in TABLES}
    method = raw.get("method", "proxy-anchor")
    if not isinstance(method, str):
        raise ValueError(f"method: got {method!r}, expected a name, such as 'proxy-anchor'")
    builders: dict[str, Callable[..., Any]] = {
        "data": DataOptions, "view": TrainView, "encoder": build, "loss": lookup(method), "train": TrainOptions
    }  # fmt: skip
    protocol = raw.get("protocol", "held-out")
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol: got {protocol!r}{_nearest(str(protocol), PROTOCOLS)}")
    for key in raw:
        if key not in TOP and key not in TABLES:
            raise ValueError(f"recipe: there is no key {key!r}{_nearest_table(key, builders)}")
    seed = raw.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed: got {seed!r}, expected a whole number of at least 0")
    encoder = complete("encoder", tables["encoder"], build, without=("size",))
    encoder["tuning"] = complete_tuning(encoder["tuning"], TUNINGS)
    named = tables["view"].pop("name", None)
    needs_size = None if encoder["weights"] is None else Needs.of(encoder["weights"]).img_size
    if needs_size is not None and "size" not in tables["view"]:
        # Part of what was said from here on: a run goes on although the file may be gone.
        raw = merged(raw, {"view": {"size": needs_size}})
        tables["view"]["size"] = needs_size
    size = {"size": 32 if encoder["backbone"] == "small" else 224}
    papers = size if named is None else named_view(named, tables["view"].get("size"))["train"]
    if protocol == "papers" and "R@1" in tables["train"].get("metrics", TrainOptions.metrics):
        tables["train"].setdefault("monitor", "R@1")
    train = complete("train", tables["train"], TrainOptions)
    names(train["metrics"])
    data = complete("data", tables["data"], DataOptions)
    if protocol != "held-out":
        # All training classes train, for as long as was said: nothing is left that could choose or stop.
        data["validation"], train["patience"] = 0.0, None
        if train["refit"]:
            raise ValueError(
                f"train.refit: got true with protocol {protocol!r}, in which all training classes train already; "
                "expected protocol 'held-out', or no refit"
            )
    loss = complete("loss", tables["loss"], lookup(method), without=("classes", "dim"))
    if train["frozen"] and "images" in needs(method, loss):
        raise ValueError(f"frozen: {method} runs the encoder on images, and features are all there is")
    if train["frozen"] and encoder["tuning"] not in ("full", "linear"):
        tuning = encoder["tuning"]
        raise ValueError(
            "train.frozen: the features are computed once, before training, and encoder.tuning="
            f"{tuning if isinstance(tuning, str) else tuning['name']!r} changes them; leave --frozen out, or train the "
            "head alone: --tuning linear"
        )
    return Recipe(
        method=method,
        protocol=protocol,
        seed=seed,
        data=DataOptions(**data),
        view={"name": named, **complete("view", {**papers, **tables["view"]}, TrainView)},
        encoder=encoder,
        loss=loss,
        train=TrainOptions(**train),
        changed={key: value for key, value in raw.items() if value not in ({}, None)},
    )


def complete(
    table: str, given: Mapping[str, Any], target: Callable[..., Any], without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`given` checked against the signature of `target`, with the defaults of what was not given."""
    parameters = {k: p for k, p in inspect.signature(target).parameters.items() if k not in without}
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    result = {k: p.default for k, p in parameters.items() if p.default is not p.empty}
    for key, value in given.items():
        if key not in parameters:
            raise ValueError(f"{table}.{key}: there is no such key{_nearest(key, parameters)}")
        if isinstance(value, More) and isinstance(result.get(key), str | dict):
            value = _laid_over(result, {key: value})[key]
        result[key] = _fitted(f"{table}.{key}", value, hints.get(key, Any))
    return result


def _fitted(name: str, value: Any, hint: Any) -> Any:
    """`value` as the annotation wants it: whole numbers pass for floats and lists for tuples, nothing else bends."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if isinstance(value, str) and value.lower() == "none" and type(None) in options:
        return None  # TOML has no word for it
    for option in options:
        kind = typing.get_origin(option) or option
        if kind is Any or (kind is type(None) and value is None):
            return value
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind is tuple and isinstance(value, list | tuple):
            inner = typing.get_args(option)
            each = [inner[0]] * len(value) if len(inner) == 2 and inner[1] is Ellipsis else list(inner)
            if len(each) == len(value):
                return tuple(_fitted(name, item, kind_of) for item, kind_of in zip(value, each, strict=True))
        elif isinstance(kind, type) and kind not in (tuple, float) and isinstance(value, kind):
            if not (isinstance(value, bool) and kind is int):
                return value
        elif kind is Path and isinstance(value, str):
            return value
    raise ValueError(f"{name}: got {value!r}, expected {' or '.join(_in_words(option) for option in options)}")


def _in_words(hint: Any) -> str:
    """An annotation as a person would say it.

    >>> _in_words(tuple[float, float]), _in_words(int)
    ('a list of 2 numbers', 'a whole number')
    """
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is dict:
        return "a table"
    if inner:
        what = {float: "numbers", int: "whole numbers", str: "names"}.get(inner[0], "values")
        return f"a list of {what}" if inner[-1] is Ellipsis else f"a list of {len(inner)} {what}"
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "text", Path: "a file"}
    return words.get(hint, "none" if hint is type(None) else getattr(hint, "__name__", str(hint)))


def _nearest(key: str, known: Iterable[str]) -> str:
    spelled = {name.lower(): name for name in known}
    near = difflib.get_close_matches(key.lower(), spelled, 1, 0.5)
    return f"; did you mean {spelled[near[0]]!r}?" if near else f"; there are {', '.join(spelled.values())}"


def _nearest_table(key: str, builders: Mapping[str, Callable[..., Any]]) -> str:
    """The key with the table that was forgotten, where one has such a key: `margin` is `loss.margin`."""
    homes = [f"{table}.{key}" for table, builder in builders.items() if key in inspect.signature(builder).parameters]
    return f"; did you mean {homes[0]!r}?" if homes else _nearest(key, (*TOP, *builders))
