"""Tunings by name, one or several joined by "+": checked, completed with defaults, and made."""

import difflib
import inspect
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from proxymetric.encoders.tuning.base import Tuning
from proxymetric.signatures import fit


class ComposedTuning(nn.ModuleDict):
    """The tunings of one encoder by name. What several do at the same place they do one after the other."""

    def parts(self) -> list[Tuning]:
        return typing.cast(list[Tuning], list(self.values()))

    @property
    def everything(self) -> bool:
        """The backbone is trained as a whole: nothing of it is held still."""
        return "full" in self

    @property
    def on_blocks(self) -> bool:
        return any(part.on_blocks for part in self.parts())

    def part(self, parameter: str) -> str:
        """What counts call the tuning that owns `parameter`."""
        return typing.cast(Tuning, self[parameter.partition(".")[0]]).part

    def trainer(self, name: str) -> str | None:
        """The part, as counts call it, of the one that trains the backbone's parameter `name`; None: it is frozen."""
        return next((part.part for part in self.parts() if part.trains(name)), None)

    def prompts(self, block: int) -> list[Tensor]:
        """Tokens (n, D) to stand before those of block number `block`."""
        found = [part.prompts(block) for part in self.parts()]
        return [tokens for tokens in found if tokens is not None]

    def beside(self, block: int) -> list[nn.Module]:
        """What changes the MLP of block number `block`."""
        found = [part.beside(block) for part in self.parts()]
        return [module for module in found if module is not None]


def complete_tuning(tuning: str | Mapping[str, Any], known: Mapping[str, type[Tuning]]) -> str | dict[str, Any]:
    """`tuning` checked and complete: its name alone, or where it takes arguments a table of name and all of them.

    >>> from proxymetric.encoders.tuning import TUNINGS
    >>> completed("bitfit+vpt", TUNINGS)
    {'name': 'vpt+bitfit', 'prompts': 10, 'depth': None, 'step': 0}
    >>> completed({"name": "vpt", "promts": 5}, TUNINGS)
    Traceback (most recent call last):
    ValueError: tuning 'vpt' has no argument 'promts'; did you mean 'prompts'?
    """
    given = {"name": tuning} if isinstance(tuning, str) else dict(tuning)
    name = given.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"tuning={tuning!r}; a name, or a table with a name, is expected: {', '.join(known)}")
    names = _names(name, known)
    arguments = {key: parameter for each in names for key, parameter in _arguments(known[each]).items()}
    for key, value in given.items():
        if key not in arguments:
            takes = f"it has {', '.join(arguments)}" if arguments else "it has none"
            raise ValueError(f"tuning {'+'.join(names)!r} has no argument {key!r}; {_near(key, arguments) or takes}")
        given[key] = fit(f"tuning.{key}", value, arguments[key][0])
    table = {key: given.get(key, default) for key, (_, default) in arguments.items()}
    return {"name": "+".join(names), **table} if table else "+".join(names)


def compose_tuning(
    tuning: str | Mapping[str, Any], backbone: Any, known: Mapping[str, type[Tuning]], blocks: bool
) -> ComposedTuning:
    """The tunings of a completed table, for `backbone`; blocks: it is a timm VisionTransformer."""
    table = {"name": tuning} if isinstance(tuning, str) else tuning
    names = table["name"].split("+")
    lacking = [name for name in names if known[name].on_blocks and not blocks]
    if lacking:
        can = ", ".join(name for name, kind in known.items() if not kind.on_blocks)
        raise ValueError(
            f"tuning={table['name']!r}: {lacking[0]} works on the blocks of a timm VisionTransformer, and this "
            f"backbone is a {type(backbone).__name__}; it can do {can}"
        )
    own = {name: {key: table[key] for key in _arguments(known[name])} for name in names}
    return ComposedTuning({name: known[name](backbone, **own[name]) for name in names})


def _names(name: str, known: Mapping[str, type[Tuning]]) -> list[str]:
    """The parts of a name in the order of `known`."""
    names = [part.strip() for part in name.split("+")]
    for part in names:
        if part not in known:
            near = _near(part, known)
            raise ValueError(f"tuning={name!r}: there is no {part!r}; {near or 'there are ' + ', '.join(known)}")
        if names.count(part) > 1:
            raise ValueError(f"tuning={name!r}: {part} stands there twice")
        if len(names) > 1 and known[part].alone:
            joinable = ", ".join(key for key, kind in known.items() if not kind.alone)
            raise ValueError(f"tuning={name!r}: {part} stands alone, {known[part].alone}; {joinable} can be joined")
    return [part for part in known if part in names]


def _arguments(kind: type[Tuning]) -> dict[str, tuple[Any, Any]]:
    """Annotation and default of each argument behind the backbone."""
    hints = typing.get_type_hints(kind.__init__)
    parameters = inspect.signature(kind).parameters
    return {key: (hints[key], parameter.default) for key, parameter in parameters.items() if key != "backbone"}


def _near(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.lower(), list(known), 1, 0.4)
    return f"did you mean {near[0]!r}?" if near else ""
