"""The verb that lists, describes and plans methods: methods."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from proxymetric.arguments.own_code import trusting
from proxymetric.arguments.written import source
from proxymetric.cli.root import app, example, typed

if TYPE_CHECKING:
    from proxymetric.system.tables import TextTable

CITATION = re.compile(r" \([^()]* et al[^()]*\)")
SENTENCE_END = re.compile(r"[.;:] ")


class Row(NamedTuple):
    """What the list says about a method."""

    paper: str
    choose: str


def method_rows() -> dict[str, Row]:
    """The rows of all methods, read from the files of the papers: their import takes seconds, because of torch.

    Example:
        >>> method_rows()["proxy-anchor"].paper
        'Kim et al. 2020, Proxy Anchor Loss for Deep Metric Learning'
    """
    catalogue, rows = source("papers/__init__.py"), {}
    for registry in ("CATALOGUE", "CLOSED_FORMS"):
        for name, place in catalogue.value(catalogue.arguments(registry)[1]).items():
            file, _, function = place.partition(":")
            paper = source(f"papers/{file}.py")
            about = paper.decoration(function, "about")
            rows[name] = Row(*(paper.value(about[key if key in about else i]) for i, key in enumerate(Row._fields)))
    return rows


def complete_method(incomplete: str) -> list[tuple[str, str]]:
    """The methods whose names begin with what was typed, each with its paper: for the completion of a shell."""
    return [(name, row.paper) for name, row in method_rows().items() if name.startswith(incomplete)]


def _defaults() -> dict[str, Any]:
    return source("runs/planning/plans.py").defaults("plan") | {"plan": None}


def _planned(text: str) -> Any:
    """An option of the plan."""
    return typer.Option(help=f"With --plan: {text}")


@app.command(
    defaults=_defaults,
    short_help="List or describe the methods, or plan memory and time.",
    epilog=example(
        "proxymetric methods",
        "proxymetric methods mpa-ap",
        "proxymetric methods mpa-ap --recipes",
        "proxymetric methods --plan 5_000_000 --dim 512 --batch 4096 --devices 8",
        "proxymetric methods cosface --plan 10M --dtype bfloat16 --device H200 --json",
    ),
)
def methods(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Describe this method: its arguments and their defaults. With --plan: plan it.",
            autocompletion=complete_method,
        ),
    ] = None,
    recipes: Annotated[
        bool, typer.Option("--recipes", help="List the shipped recipes instead, or those of the method NAME.")
    ] = False,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="CLASSES",
            help="Estimate memory and time of a loss over this many classes: 5_000_000, 5e6 or 5M. NAME is a method "
            "with learned proxies; proxy-anchor if it is left out.",
        ),
    ] = None,
    dim: Annotated[str | None, _planned("dimensions of the embedding.")] = None,
    batch: Annotated[str | None, _planned("number of embeddings in a step, on all devices together.")] = None,
    devices: Annotated[str | None, _planned("number of devices that share the classes.")] = None,
    per_class: Annotated[str | None, _planned("proxies per class.")] = None,
    dtype: Annotated[str | None, _planned("type of the proxies: float32 or bfloat16.")] = None,
    optimizer: Annotated[str | None, _planned("optimiser of the proxies: adamw, adam, sgd or rowwise-adagrad.")] = None,
    implementation: Annotated[
        str | None,
        _planned("implementation of the loss: plain, chunked or triton. auto: triton on a GPU, chunked on a CPU."),
    ] = None,
    touched: Annotated[
        str | None,
        _planned(
            "classes that a step compares with: all; batch (the classes of the batch); or 0.1 (those and a tenth of "
            "the others). Any value but all changes the loss."
        ),
    ] = None,
    memory: Annotated[
        str | None, _planned("GB of a device. Default: the memory of --device, or of this machine's GPU, or 80.")
    ] = None,
    device: Annotated[
        str | None,
        _planned("device whose measured rates are used. Default: the one most similar to this machine's device."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; a plan in bytes and seconds.")] = False,
) -> None:
    """List the methods with their papers and when to choose each, describe one method, or plan its memory and time.

    A plan says what each device holds, whether the classes fit, how long a step takes, and which changes would help.
    Times are computed from measured rates. The encoder and its activations are not included: a smaller --memory leaves
    room for them. 1 GB is 10^9 bytes.
    """
    ctx.with_resource(trusting(name))
    words = {key: ctx.params[key] for key in typed(ctx) if key not in ("name", "recipes", "plan", "as_json")}
    if plan is not None and recipes:
        raise ValueError("plan, recipes: got both, expected one")
    if plan is None and words:
        first, value = next(iter(words.items()))
        raise ValueError(f"{first}: got {value!r} without --plan, expected --plan and the number of classes")
    if plan is not None:
        _plan(plan, words if name is None else words | {"method": name}, as_json)
    elif recipes:
        _list_recipes(name, as_json)
    elif name is None:
        _list_methods(as_json)
    else:
        _describe(name, as_json)


def _plan(classes: str, words: dict[str, Any], as_json: bool) -> None:
    """Estimate memory and time."""
    import proxymetric as pm
    from proxymetric.cli.planning import show_plan
    from proxymetric.system.terminal import Terminal

    plan = pm.plan(classes, **words)
    if as_json:
        Terminal().dump(plan.as_dict())
    else:
        show_plan(plan, Terminal())


def _list_methods(as_json: bool) -> None:
    """List the methods, without an import of torch."""
    from proxymetric.cli.tables import catalogue_table
    from proxymetric.system.terminal import Terminal

    rows = method_rows()
    if as_json:
        Terminal().dump([{"name": name, **row._asdict()} for name, row in rows.items()])
        return
    terminal = Terminal()
    terminal.show(catalogue_table(rows))
    terminal.say("\nproxymetric methods NAME describes one method and its arguments")


def _describe(name: str, as_json: bool) -> None:
    """Describe one method."""
    from proxymetric.papers import lookup
    from proxymetric.papers import options as arguments
    from proxymetric.system.terminal import Terminal

    row = lookup(name)
    text = inspect.cleandoc(row.__doc__ or "")
    defaults = {key: parameter.default for key, parameter in arguments(name).items()}
    if as_json:
        about = {"name": name, "paper": row.about.paper, "choose": row.about.choose, "description": text}
        Terminal().dump(about | {"arguments": defaults})
        return
    terminal = Terminal()
    first, *other_lines = text.splitlines() or [""]
    terminal.print(f"{name}: {first}")
    for line in other_lines:
        terminal.print(line.strip())
    terminal.print(f"\npaper: {row.about.paper}\nchoose it: {row.about.choose}\n\narguments with their defaults:")
    for key, default in defaults.items():
        terminal.print(f"  --set loss.{key}={default}")


def _list_recipes(method: str | None, as_json: bool) -> None:
    """List the shipped recipes, or those of one method."""
    from proxymetric.papers import lookup
    from proxymetric.system.terminal import Terminal

    if method is not None:
        lookup(method)
    rows = _recipe_rows(method)
    if as_json:
        Terminal().dump(rows)
        return
    terminal = Terminal()
    terminal.show(_recipe_table(rows))
    terminal.say("\nproxymetric train --recipe RECIPE --data FOLDER trains one; --set changes its settings")


def _recipe_rows(method: str | None) -> list[dict[str, str]]:
    """The shipped recipes, or those of one method: name, method, and the first sentence of the file."""
    from proxymetric.runs import recipe

    rows = []
    for name in recipe.names():
        method_of_recipe = recipe.load(name)["method"]
        if method in (None, method_of_recipe):
            sentence = _first_sentence(recipe.find(name).read_text("utf-8"))
            rows.append({"recipe": name, "method": method_of_recipe, "what it is": sentence})
    return rows


def _recipe_table(rows: list[dict[str, str]]) -> TextTable:
    from proxymetric.system.tables import TextTable

    columns = ["recipe", "method", "what it is"]
    table = TextTable("", columns, left=tuple(columns))
    for row in rows:
        table.add(*row.values())
    return table


def _first_sentence(toml: str) -> str:
    """The first sentence of the comment at the head of a file, without its citations, in at most 100 characters.

    >>> _first_sentence("# MPA on Cars196 (Saeki et al. 2023): ten\\n# proxies. More.\\nmethod = 'mpa'")
    'MPA on Cars196'
    """
    comment = " ".join(line.strip("# ") for line in toml.splitlines() if line.startswith("#"))
    sentence = SENTENCE_END.split(CITATION.sub("", f"{comment} "))[0]
    return textwrap.shorten(sentence.rstrip(" ,"), 100, placeholder=" ...")
