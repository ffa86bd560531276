"""Recipes: a TOML file, flags and settings become one checked description of a run.

A recipe has five tables. The keys of each are the arguments of a class or function in the code:

=============  =====================================================================
table          what its keys are
=============  =====================================================================
`[data]`       fields of `DataOptions`: where the images are and how they are split
`[view]`       arguments of `data.TrainView`: size, crop, flip, or a view's `name`
`[encoder]`    arguments of `encoders.build`: backbone, dim, pooling, weights, ...
`[loss]`       arguments of the method: scale, margin, per_class, ...; `nested` of any
`[train]`      fields of `TrainOptions`: epochs, learning rates, schedule, ...
=============  =====================================================================

`method`, `protocol` and `seed` stand outside the tables. An unknown key is an error that names the most similar key.

The package ships recipes. `find("cub/proxy-anchor")` returns the file of the recipe with that name.
"""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxymetric.arguments.checks import MAX_DIM, SIZE, SIZES, SMALL_SIZE
from proxymetric.arguments.recipe_keys import everyday_hint
from proxymetric.arguments.signatures import did_you_mean, fit, one_of
from proxymetric.runs.defaults import imply_defaults
from proxymetric.runs.protocol import MLRC, PROTOCOLS
from proxymetric.system.files import read_toml
from proxymetric.training.options import TrainOptions

TOP_DEFAULTS: dict[str, Any] = {"method": "proxy-anchor", "protocol": "held-out", "seed": 0}
"""the keys outside the tables, with their defaults"""
TABLES = ("data", "view", "encoder", "loss", "train")
CACHES = ("auto", "none", "memory", "device")
DECODINGS = ("full", "reduced")
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class DataOptions:
    """The table `[data]`: where the images are, and which classes are used for validation and test.

    Attributes:
        path: a folder of class folders, a CSV of file and class, a benchmark's folder, "glyphs" or "digits".
        layout: "auto", "folder", "nested", "csv", or a benchmark (`data.open_data` explains them).
        validation: fraction of the training classes that are held out to choose the epoch, or a fold such as "1/4".
            If the data has its own validation images (a folder val/), they are used for every fraction above 0.
        test: "auto" (the test classes of a benchmark, or the test images of data that is already split; none for other
            data), "none", or a fraction of the classes.
        cache: "none" decodes images when they are needed, "memory" keeps them decoded, "device" keeps them on the
            accelerator and augments them there. "auto" means "device" for the embedded sets and "none" for files.
        workers: processes that decode images; -1 chooses a number.
        decode: "full", or "reduced" to decode large JPEGs of the training at 1/2, 1/4 or 1/8 of their size, as long as
            the shorter side is not below that of the view: faster, but the pixels change.
        fraction: share of each training class's images that is used, at least two images; the seed determines which.
        wrong_labels: share of the training images that get the label of another class; the seed determines which. For
            studies of robustness.
    """

    path: str = ""
    layout: str = "auto"
    validation: float | str = 0.2
    test: str | float = "auto"
    cache: str = "auto"
    workers: int = -1
    decode: str = "full"
    fraction: float = 1.0
    wrong_labels: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"data.fraction: got {self.fraction}, expected a number above 0 and at most 1")
        if not 0 <= self.wrong_labels < 1:
            raise ValueError(f"data.wrong_labels: got {self.wrong_labels}, expected a number of at least 0 and below 1")
        one_of("data.cache", self.cache, CACHES)
        one_of("data.decode", self.decode, DECODINGS)
        if self.workers < -1:
            raise ValueError(f"data.workers: got {self.workers}, expected a number of processes, or -1 to choose one")


@dataclass(frozen=True)
class Recipe:
    """A checked description of a run, complete with defaults.

    Attributes:
        method: name of the method.
        protocol: which classes choose the epoch, see `proxymetric.runs.protocol`.
        seed: seed of all random numbers.
        data: the table `[data]`.
        view: the table `[view]`.
        encoder: the table `[encoder]`.
        loss: the table `[loss]`.
        train: the table `[train]`.
        changed: only the keys that were given, without defaults.
    """

    method: str
    protocol: str
    seed: int
    data: DataOptions
    view: dict[str, Any]
    encoder: dict[str, Any]
    loss: dict[str, Any]
    train: TrainOptions
    changed: dict[str, Any] = field(default_factory=dict, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """The whole recipe as tables that JSON can hold."""
        content = dataclasses.asdict(self)
        del content["changed"]
        return content


def folder() -> Path:
    """The folder of the shipped recipes: inside an installed package, or next to `src` in a checkout."""
    package = Path(__file__).resolve().parent.parent
    places = (package / "recipes", package.parent.parent / "recipes")
    return next((place for place in places if place.is_dir()), places[0])


def names() -> list[str]:
    """The names of the shipped recipes.

    Example:
        >>> "glyphs/demo" in names()
        True
    """
    place = folder()
    return sorted(file.relative_to(place).with_suffix("").as_posix() for file in place.rglob("*.toml"))


def find(recipe: str | Path) -> Path:
    """The file of a recipe.

    Args:
        recipe: a TOML file, or the name of a shipped recipe. The name may be written as in a checkout:
            "recipes/cub/proxy-anchor.toml".

    Raises:
        ValueError: there is neither such a file nor such a name.

    Example:
        >>> find("glyphs/demo").name
        'demo.toml'
        >>> find("glyphs/dmo")
        Traceback (most recent call last):
        ValueError: recipe: got 'glyphs/dmo', expected a TOML file or the name of a shipped recipe; did you mean
        'glyphs/demo'?
    """
    path = Path(recipe)
    if path.is_file():
        return path
    name = path.as_posix().removeprefix("recipes/").removesuffix(".toml")
    if name in names():
        return folder() / f"{name}.toml"
    neighbours = [str(file) for file in path.parent.glob("*.toml")] if path.suffix == ".toml" else []
    hint = did_you_mean(str(path), neighbours) or did_you_mean(name, names())
    raise ValueError(f"recipe: got {str(recipe)!r}, expected a TOML file or the name of a shipped recipe{hint}")


def load(recipe: str | Path) -> dict[str, Any]:
    """Read a recipe as tables, without checking its keys.

    Args:
        recipe: a TOML file, or the name of a shipped recipe.

    Raises:
        ValueError: there is no such recipe, or it is not valid TOML.
    """
    return read_toml(find(recipe), "recipe")


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables key by key; later layers win.

    Raises:
        ValueError: a key is a table in one layer and a value in another.

    Example:
        >>> merged({"seed": 1, "loss": {"margin": 0.1, "scale": 32}}, {"loss": {"margin": 0.2}})
        {'seed': 1, 'loss': {'margin': 0.2, 'scale': 32}}
        >>> merged({"encoder": {"tuning": "vpt"}}, settings(["encoder.tuning.prompts=5"]))
        {'encoder': {'tuning': {'name': 'vpt', 'prompts': 5}}}
    """
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            previous = result.get(key, {})
            if isinstance(value, Mapping) != isinstance(previous, Mapping) and previous != {}:
                raise ValueError(f"{key}: got {previous!r} and {value!r}, expected a table or a value, not both")
            result[key] = _updated(previous, value) if isinstance(value, Mapping) else value
    return result


class InnerKeys(dict[str, Any]):
    """Keys of a value that is itself a table, or a name that stands for one: `encoder.tuning.prompts=20`."""


NAME_KEYS = {"base": "method"}
"""for values that may be a name or a table: the key of the table that holds the name; "name" for all others"""


def _updated(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A table with changed keys; `InnerKeys` are merged into the current value of their key."""
    result = dict(table)
    for key, value in changes.items():
        current = result.get(key)
        if isinstance(value, InnerKeys) and current is not None:
            inner = current if isinstance(current, dict) else {NAME_KEYS.get(key, "name"): current}
            value = type(inner)(inner | value)  # `InnerKeys` if both are, a table otherwise
        result[key] = value
    return result


def settings(pairs: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Parse settings into tables.

    Args:
        pairs: `table.key=value` texts, or a mapping from `table.key` to values. The value of a text is read as TOML, or
            as plain text if it is not TOML. The key of an inner table has one more dot: `encoder.tuning.prompts=20`.

    Raises:
        ValueError: a text has no `=`.

    Example:
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
            value = InnerKeys({rest[1]: value})
        result = merged(result, {table: {rest[0]: value} if rest else value})
    return result


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError):
        raise ValueError(
            f"settings: got {text[:20]}..., nested too deeply or too long; expected a TOML value"
        ) from None


def check_backbone(name: str) -> None:
    """Refuse the name of a backbone that nobody knows; `check` does not look, because timm takes seconds to import.

    Args:
        name: `encoder.backbone` of a recipe.

    Raises:
        ValueError: the name is unknown; the message has similar names.

    Example:
        >>> check_backbone("smal")
        Traceback (most recent call last):
        ValueError: backbone: got 'smal', expected small, bn_inception or a model of timm; did you mean ...?...
    """
    from proxymetric.encoders.backbones import check_name

    check_name(name)


def check(raw: Mapping[str, Any]) -> Recipe:
    """Check every key of a recipe and fill in the defaults.

    Args:
        raw: the tables, as `merged` returns them.

    Raises:
        ValueError: a key is unknown, a value has the wrong type or range, or keys contradict each other.

    Example:
        >>> check({"train": {"epochs": 3}}).train.epochs
        3
    """
    from proxymetric.data.views import TrainView, named_view
    from proxymetric.encoders import TUNINGS, build
    from proxymetric.encoders.needs import Needs
    from proxymetric.encoders.pooling import POOLINGS
    from proxymetric.encoders.tuning import complete_tuning
    from proxymetric.metrics import names as metric_names
    from proxymetric.papers import lookup, needs
    from proxymetric.papers.closed_form import imply_settings

    for name, table in raw.items():
        if name in TABLES and not isinstance(table, Mapping):
            raise ValueError(f"{name}: got {table!r}, expected a table, or a key of it: {name}.KEY=VALUE")
    tables: dict[str, dict[str, Any]] = {name: dict(raw.get(name, {})) for name in TABLES}
    method = raw.get("method", TOP_DEFAULTS["method"])
    if not isinstance(method, str):
        raise ValueError(f"method: got {method!r}, expected a name, such as 'proxy-anchor'")
    builders: dict[str, Callable[..., Any]] = {
        "data": DataOptions,
        "view": TrainView,
        "encoder": build,
        "loss": lookup(method),
        "train": TrainOptions,
    }
    protocol = raw.get("protocol", TOP_DEFAULTS["protocol"])
    if protocol == MLRC:
        raise ValueError(
            "protocol: got 'mlrc', which trains several models; expected it as `proxymetric train --protocol mlrc`, or "
            "in Python `proxymetric.runs.mlrc.mlrc`"
        )
    one_of("protocol", protocol, (*PROTOCOLS, MLRC))
    for key in raw:
        if key not in TOP_DEFAULTS and key not in TABLES:
            raise ValueError(f"recipe: got the key {key!r}, expected {_expected_key(key, builders)}")
    seed = raw.get("seed", TOP_DEFAULTS["seed"])
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed: got {seed!r}, expected a whole number of at least 0 and at most {MAX_SEED}")
    imply_settings(method, protocol, tables)
    imply_defaults(tables)
    encoder = complete("encoder", tables["encoder"], build, without=("size",))
    one_of("encoder.pooling", encoder["pooling"], POOLINGS)
    if encoder["dim"] is not None and not 1 <= encoder["dim"] <= MAX_DIM:
        limit = "at least 1" if encoder["dim"] < 1 else f"at most {MAX_DIM}"
        raise ValueError(f"encoder.dim: got {encoder['dim']}, expected {limit}")
    encoder["tuning"] = complete_tuning(encoder["tuning"], TUNINGS)
    view_name = tables["view"].pop("name", None)
    needed_size = None if encoder["weights"] is None else Needs.of(encoder["weights"]).img_size
    if needed_size is not None and "size" not in tables["view"]:
        # Store the size with the given keys, so that a run can be resumed without the weights file.
        raw = merged(raw, {"view": {"size": needed_size}})
        tables["view"]["size"] = needed_size
    size = {"size": SMALL_SIZE if encoder["backbone"] == "small" else SIZE}
    view_defaults = size if view_name is None else named_view(view_name, tables["view"].get("size"))["train"]
    if protocol == "papers" and "R@1" in tables["train"].get("metrics", TrainOptions.metrics):
        tables["train"].setdefault("monitor", "R@1")
    train = complete("train", tables["train"], TrainOptions)
    metric_names(train["metrics"])
    data = complete("data", tables["data"], DataOptions)
    if protocol != "held-out":
        # All training classes are trained on: no class is left to choose the epoch or to stop early.
        data["validation"], train["patience"] = 0.0, None
        if train["refit"]:
            raise ValueError(
                f"train.refit: got true with protocol {protocol!r}, which trains on all training classes already; "
                "expected protocol 'held-out', or no refit"
            )
    nested = tables["loss"].pop("nested", None)
    loss = complete("loss", tables["loss"], lookup(method), without=("classes", "dim"))
    loss["nested"] = None if nested in (None, "none") else _sizes(nested, encoder["dim"])
    if train["frozen"] and "images" in needs(method, loss):
        raise ValueError(
            f"train.frozen: got true, but {method} runs the encoder on images, and only cached features are available; "
            "expected no --frozen"
        )
    if train["frozen"] and encoder["tuning"] not in ("full", "linear"):
        tuning = encoder["tuning"]
        raise ValueError(
            "train.frozen: got true, but the cached features are computed before training and encoder.tuning="
            f"{tuning if isinstance(tuning, str) else tuning['name']!r} would change them; expected no --frozen, or "
            "--tuning linear"
        )
    transform = tables["view"].get("transform")
    if transform is not None and not isinstance(transform, str):
        raise ValueError(
            f"view.transform: got {transform!r}, expected 'module:function'; a transform of Python is an argument: "
            "proxymetric.train(..., transform=...)"
        )
    if transform not in (None, "none") and data["cache"] == "device":
        raise ValueError(
            f"data.cache: got 'device' with view.transform={transform!r}, which changes one image at a time in main "
            "memory; expected 'none', 'memory' or 'auto'"
        )
    if transform not in (None, "none") and train["frozen"]:
        raise ValueError(
            f"train.frozen: got true with view.transform={transform!r}, but cached features are those of one view "
            "without random changes; expected no --frozen"
        )
    view = {"name": view_name, **complete("view", {**view_defaults, **tables["view"]}, TrainView)}
    if not SIZES[0] <= view["size"] <= SIZES[1]:
        raise ValueError(f"view.size: got {view['size']}, expected at least {SIZES[0]} and at most {SIZES[1]} pixels")
    return Recipe(
        method=method,
        protocol=protocol,
        seed=seed,
        data=DataOptions(**data),
        view=view,
        encoder=encoder,
        loss=loss,
        train=TrainOptions(**train),
        changed={key: value for key, value in raw.items() if value not in ({}, None)},
    )


def _sizes(nested: Any, dim: int | None) -> list[int]:
    """Check `loss.nested`, which every method takes: sizes as a list, or as text separated by commas."""
    from proxymetric.losses.nested import check_sizes

    if isinstance(nested, str) and all(part.strip().isdigit() for part in nested.split(",")):
        nested = [int(part) for part in nested.split(",")]
    check_sizes(nested, dim)
    return list(nested)


def complete(
    table: str, given: Mapping[str, Any], target: Callable[..., Any], without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Check the keys of a table against a signature and fill in the defaults.

    Args:
        table: name of the table, for errors.
        given: its keys and values.
        target: the class or function whose arguments are the keys.
        without: arguments that are not keys of the table.

    Raises:
        ValueError: a key is unknown or a value has the wrong type.
    """
    parameters = {k: p for k, p in inspect.signature(target).parameters.items() if k not in without}
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    result = {k: p.default for k, p in parameters.items() if p.default is not p.empty}
    for key, value in given.items():
        if key not in parameters:
            hint = everyday_hint(key) or did_you_mean(key, parameters) or f" ({', '.join(parameters)})"
            raise ValueError(f"{table}.{key}: got an unknown key, expected a key of [{table}]{hint}")
        if isinstance(value, InnerKeys) and isinstance(result.get(key), str | dict):
            value = _updated(result, {key: value})[key]
        result[key] = fit(f"{table}.{key}", value, hints.get(key, Any))
    return result


def _expected_key(key: str, builders: Mapping[str, Callable[..., Any]]) -> str:
    """The keys that are allowed at the top level, and a suggestion for an unknown key, such as `loss.margin`."""
    homes = [f"{table}.{key}" for table, builder in builders.items() if key in inspect.signature(builder).parameters]
    known = (*TOP_DEFAULTS, *builders)
    hint = f"; did you mean {homes[0]!r}?" if homes else everyday_hint(key) or did_you_mean(key, known)
    return f"one of {', '.join(known)}{hint}"
