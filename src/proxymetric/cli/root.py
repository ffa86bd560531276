"""The program that verbs are added to, and the options that several of them have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from proxymetric import __version__


def example(*lines: str) -> str:
    """The foot of a help page: commands that are not broken at hyphens."""
    return "\b\n" + "\n".join(("Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)))


app = typer.Typer(
    name="proxymetric",
    help="Learn an embedding from labelled images, to find things of classes it has never seen by similarity.",
    epilog=example(
        "proxymetric train --data PHOTOS --out runs/photos    (PHOTOS/<class>/*.jpg)",
        "proxymetric query runs/photos PHOTOS unknown.jpg",
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

Data = Annotated[
    str | None,
    typer.Option("--data", "-d", help="Folder of class folders, CSV of file and class, a benchmark, glyphs or digits."),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, as `train --out` wrote it.")]
RunOrFile = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a run, or the file that `export --slim` wrote of it.")
]
Weights = Annotated[
    Path | None, typer.Option(help="For a slim file: its backbone's weights (safetensors) instead of the hub's.")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:0.")]
Which = Annotated[str, typer.Option(help="best; last; or chosen, the best before a refit.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the verb."""
