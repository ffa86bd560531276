"""Checks, completes and makes the tunings that a name such as "vpt" or "vpt+bitfit" stands for."""

import inspect
import typing
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from proxymetric.arguments.signatures import did_you_mean, fit, one_of
from proxymetric.encoders.tuning.base import Tuning


class ComposedTuning(nn.ModuleDict):
    """The tunings of one encoder by name. If several tunings change the same block, they act one after the other."""

    def parts(self) -> list[Tuning]:
        """Return the tunings in the order of `TUNINGS`."""
        return typing.cast(list[Tuning], list(self.values()))

    @property
    def everything(self) -> bool:
        """Whether every parameter of the backbone is trained."""
        return "full" in self

    @property
    def on_blocks(self) -> bool:
        """Whether a tuning changes the blocks of a ViT."""
        return any(part.on_blocks for part in self.parts())

    def part(self, parameter: str) -> str:
        """Return the part under which `parameter`, named `<tuning>.*`, is counted."""
        return typing.cast(Tuning, self[parameter.partition(".")[0]]).part

    def trainer(self, name: str) -> str | None:
        """Return the part under which the parameter `name` of the backbone is counted; None: it is frozen."""
        return next((part.part for part in self.parts() if part.trains(name)), None)

    def prompts(self, block: int) -> list[Tensor]:
        """Return the prompts (n, D) of each tuning that has prompts in block number `block`."""
        prompts = [tuning.prompts(block) for tuning in self.parts()]
        return [tokens for tokens in prompts if tokens is not None]

    def beside(self, block: int) -> list[nn.Module]:
        """Return the modules that change the output of the MLP in block number `block`."""
        modules = [tuning.beside(block) for tuning in self.parts()]
        return [module for module in modules if module is not None]


def complete_tuning(tuning: str | Mapping[str, Any], known: Mapping[str, type[Tuning]]) -> str | dict[str, Any]:
    """Check a tuning and complete its arguments with their defaults.

    Args:
        tuning: a name such as "vpt+bitfit", or a table of "name" and arguments.
        known: the classes of all tunings by name.

    Returns:
        The name alone, or, if the tuning has arguments, a table of "name" and all of them. Joined names are put in the
        order of `known`.

    Raises:
        ValueError: a name or an argument is unknown, a value has the wrong type, or the tunings cannot be joined.

    Example:
        >>> from proxymetric.encoders.tuning import TUNINGS
        >>> complete_tuning("bitfit+vpt", TUNINGS)
        {'name': 'vpt+bitfit', 'prompts': 10, 'depth': None, 'step': 0}
        >>> complete_tuning({"name": "vpt", "promts": 5}, TUNINGS)
        Traceback (most recent call last):
        ValueError: tuning: got argument 'promts' for 'vpt', expected one of prompts, ...; did you mean 'prompts'?
    """
    values = {"name": tuning} if isinstance(tuning, str) else dict(tuning)
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"tuning: got {tuning!r}, expected a name or a table with a name, one of {', '.join(known)}")
    names = _names(name, known)
    arguments = {key: parameter for part in names for key, parameter in _arguments(known[part]).items()}
    for key, value in values.items():
        if key not in arguments:
            expected = f"one of {', '.join(arguments)}" if arguments else "no arguments"
            hint = did_you_mean(key, arguments)
            raise ValueError(f"tuning: got argument {key!r} for {'+'.join(names)!r}, expected {expected}{hint}")
        values[key] = fit(f"tuning.{key}", value, arguments[key][0])
    table = {key: values.get(key, default) for key, (_, default) in arguments.items()}
    return {"name": "+".join(names), **table} if table else "+".join(names)


def compose_tuning(
    tuning: str | Mapping[str, Any], backbone: Any, known: Mapping[str, type[Tuning]], blocks: bool
) -> ComposedTuning:
    """Make the modules of a checked tuning.

    Args:
        tuning: the result of `complete_tuning`.
        backbone: the network to adapt.
        known: the classes of all tunings by name.
        blocks: whether `backbone` is a timm VisionTransformer.

    Raises:
        ValueError: a tuning does not suit the backbone.
    """
    table = {"name": tuning} if isinstance(tuning, str) else tuning
    names = table["name"].split("+")
    unsuitable = [name for name in names if known[name].on_blocks and not blocks]
    if unsuitable:
        suitable = ", ".join(name for name, kind in known.items() if not kind.on_blocks)
        raise ValueError(
            f"tuning: got {unsuitable[0]!r} for a {type(backbone).__name__}, expected one of {suitable}; "
            f"{unsuitable[0]} needs the blocks of a timm VisionTransformer"
        )
    arguments = {name: {key: table[key] for key in _arguments(known[name])} for name in names}
    return ComposedTuning({name: known[name](backbone, **arguments[name]) for name in names})


def _names(name: str, known: Mapping[str, type[Tuning]]) -> list[str]:
    """Return the names that are joined by "+" in `name`, in the order of `known`."""
    names = [part.strip() for part in name.split("+")]
    for part in names:
        one_of("tuning", part, known)
        if names.count(part) > 1:
            raise ValueError(f"tuning: got {name!r}, expected {part} only once")
        if len(names) > 1 and known[part].alone:
            joinable = ", ".join(key for key, kind in known.items() if not kind.alone)
            raise ValueError(
                f"tuning: got {name!r}, expected {part} alone because {known[part].alone}; {joinable} can be joined"
            )
    return [part for part in known if part in names]


def _arguments(kind: type[Tuning]) -> dict[str, tuple[Any, Any]]:
    """Return the annotation and the default of each argument after `backbone`."""
    hints = typing.get_type_hints(kind.__init__)
    parameters = inspect.signature(kind).parameters
    for key in parameters:
        if key not in hints:
            raise TypeError(f"{kind.__name__}.{key}: got no annotation, expected the type of this setting")
    return {key: (hints[key], parameter.default) for key, parameter in parameters.items() if key != "backbone"}
