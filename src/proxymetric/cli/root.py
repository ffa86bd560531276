"""The program that the verbs are added to, and the options that several verbs share."""

from __future__ import annotations

import functools
import inspect
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from proxymetric.arguments.own_code import trusting
from proxymetric.system.faults import said_once
from proxymetric.system.version import __version__


def example(*lines: str) -> str:
    """The last lines of a help page: examples of commands, which are never wrapped."""
    return "\b\n" + "\n".join(("Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)))


USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""what typer raises for words that do not fit a verb"""
NUMBERS = {"int": "a whole number, in the digits 0 to 9", "float": "a number, such as 0.1"}
"""how typer's types of errors begin -> what is expected"""
RENAMED = {
    "mlrc": "train --protocol mlrc", "report": "evaluate --redraw", "plan": "methods --plan",
    "query": "search RUN IMAGE --in IMAGES", "identify": "search INDEX IMAGE --identify",
    "add-class": "index add-class INDEX NAME IMAGE", "remove": "index remove INDEX ID",
}  # fmt: skip
"""verbs of earlier versions -> how they are written now"""
UNKNOWN_VERB = re.compile(r"No such command '(\S+)'\.")
EXTRA_WORD = re.compile(r"Got unexpected extra argument\S* \((\S+)\)")


ABSENT = {"help": False, "install_completion": False, "show_completion": False}
"""the values of absent options of typer: without a value, typer 0.29 imports pydantic to convert it"""
VOLUME = {
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")],
    "verbose": Annotated[bool, typer.Option("--verbose", "-v", help="More progress; where an error arose.")],
}
"""the options that every verb has"""
Defaults = Callable[[], dict[str, Any]]
"""what the options of a verb are if they are not typed, by name; called when the help is shown"""


class Verb(TyperCommand):
    """A verb whose help shows the default of every option that takes a value."""

    defaults: Defaults = dict

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            if not parameter.required and parameter.callback is None:
                parameter.process_value = _if_typed(parameter.process_value)  # type: ignore[assignment]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options with their defaults."""
        known = {"device": "auto"} | self.defaults()
        for option in self.params:
            if isinstance(option, TyperOption) and not option.required and not option.is_eager and not option.multiple:
                _show_default(option, known.get(str(option.name), option.default))
        super().format_options(ctx, formatter)


def _if_typed(process: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Convert a value only if there is one: typer 0.29 imports pydantic, which takes 0.1 s, also to convert None."""
    return lambda ctx, value: None if value is None else process(ctx, value)


def _show_default(option: TyperOption, value: Any) -> None:
    """Let the help of an option end with its default, unless its help says what that is in words."""
    if "Default:" in (option.help or "") or (option.is_flag and not option.secondary_opts):
        return  # a switch is off
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    option.default = "none" if value in (None, "") else value
    option.show_default = True


class Program(typer.Typer):
    """The program, whose verbs are `Verb`s."""

    def command(self, name: str | None = None, *, defaults: Defaults = dict, **options: Any) -> Any:
        """Add a verb, as in typer, with --quiet and --verbose; `defaults` are shown where its signature has none."""
        verb = type("Verb", (Verb,), {"defaults": staticmethod(defaults)})
        add = super().command(name, cls=verb, context_settings={"default_map": ABSENT}, **options)
        return lambda callback: add(_with_volume(callback))


def _with_volume(callback: Callable[..., Any]) -> Callable[..., Any]:
    """A verb that also takes --quiet and --verbose, which say how much it prints beside its result."""

    @functools.wraps(callback)
    def run(*arguments: Any, quiet: bool, verbose: bool, **options: Any) -> Any:
        from proxymetric.system.terminal import speaking

        with speaking(quiet, verbose):
            try:
                return callback(*arguments, **options)
            except typer.Exit:
                raise
            except Exception:
                if verbose:
                    traceback.print_exc()
                raise

    signature = inspect.signature(callback, eval_str=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, kind, default=False, annotation=VOLUME[name]) for name in VOLUME]
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = callback.__annotations__ | VOLUME
    return run


class Verbs(TyperGroup):
    """The verbs, of one word or two, with errors that say what was got, and which option was probably meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb that the words begin with."""
        if len(args) > 1 and f"{args[0]} {args[1]}" in self.commands:
            args = [f"{args[0]} {args[1]}", *args[2:]]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a verb."""
        try:
            return super().invoke(ctx)
        except USAGE_ERROR as error:
            _explain(error)
            _show_once(error)
            raise


def _explain(error: Any) -> None:
    """Complete the message of a usage error."""
    # Those of pydantic, which converts numbers.
    wrong_values: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if wrong_values:
        got, kind = wrong_values[0]["input"], str(wrong_values[0]["type"]).split("_")[0]
        expected = NUMBERS.get(kind)
        error.message = f"got {got!r}, expected {expected}" if expected else f"got {got!r}; {error.message}"
    elif (match := UNKNOWN_VERB.match(str(error.message))) and match[1] in RENAMED:
        error.message = f"got the verb {match[1]!r}, expected `proxymetric {RENAMED[match[1]]}`"
    elif (match := EXTRA_WORD.fullmatch(str(error.message))) and error.ctx is not None:
        takes_data = any(parameter.name == "data" for parameter in error.ctx.command.params)
        if takes_data and error.ctx.params.get("data") is None:
            error.message += f"; did you mean '--data {match[1]}'?"


def _show_once(error: Any) -> None:
    """Let only one of the processes that torchrun started print a usage error."""
    show = error.show

    def show_once(file: Any = None) -> None:
        with said_once(error.format_message(), each_start=False, stream=file) as is_first:
            if is_first:
                show(file)

    error.show = show_once


app = Program(
    name="proxymetric",
    cls=Verbs,
    help="Train an image embedding on labelled images, and use it to find similar images, also of new classes.",
    epilog=example(
        "proxymetric demo",
        "proxymetric train --data IMAGES --out runs/photos    (IMAGES/<class>/*.jpg)",
        "proxymetric search runs/photos unknown.jpg --in IMAGES",
        "proxymetric train --help",
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "default_map": ABSENT,
    },
)

Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        "-d",
        help="The labelled images: a folder with one folder per class, a CSV of file and class, a pack "
        "(.npz), the folder of a benchmark, hf:PLACE, glyphs or digits.",
    ),
]


def local(run: Path) -> Path:
    """Refuse an address on the hub, where the folder of a run is needed."""
    if run.parts[:1] == ("hf:",):
        raise ValueError(
            f"RUN: got hf://{'/'.join(run.parts[1:])}, a shared model, which holds neither the recipe nor the results "
            "of its run; expected the folder of a run (`train --out`)"
        )
    return run


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run (`train --out`).", callback=local)]
RunOrFile = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Folder of a run (`train --out`), file of `export --slim`, folder of `export --hub`, its address on "
        "the Hugging Face hub: hf://owner/name, or a pre-trained backbone: backbone:NAME.",
    ),
]
SlimWeights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        help="For a slim file or a pre-trained backbone: the backbone's weights (safetensors), instead of the hub's.",
    ),
]
Backbone = Annotated[
    str | None,
    typer.Option(
        help="Without a RUN: the pre-trained backbone, a model name of timm. Default: the one that the index has, or "
        "that the file of --weights names; else DINOv2, its ViT-S on a CPU and its ViT-B on a GPU.",
    ),
]
Device = Annotated[str | None, typer.Option(help="Where to compute: auto, cpu, cuda or cuda:0.")]
Which = Annotated[
    str,
    typer.Option(help="Which model of the run: best, last, or chosen (the best one before a refit)."),
]

CutDim = Annotated[
    int | None,
    typer.Option(
        "--dim",
        help="Keep this many of the first dimensions, of a run that was trained with --nested. Default: all; `index`: "
        "as before.",
    ),
]

VectorKind = Annotated[
    str | None,
    typer.Option(
        "--vectors",
        help="Numbers of the vectors: float32, int8 (a quarter of the bytes), or binary (bits, whose first results are "
        "ranked again by 8-bit numbers). Default: float32; `index`: as before.",
    ),
]


def typed(ctx: typer.Context) -> list[str]:
    """The names of the arguments and options that the user typed, in the order of the help."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params if name not in VOLUME}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def _version(requested: bool) -> None:
    if requested:
        typer.echo(__version__)
        raise typer.Exit


TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        help="Import code (module:function) that a recipe, a study or run.json names; without it only code that this "
        "command names.",
    ),
]


@app.callback()
def options(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the verb."""
    ctx.with_resource(trusting())  # no verb imports what a file names, unless it says so itself
