"""The verb that trains many runs: study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxymetric.cli.root import app, example

if TYPE_CHECKING:
    from rich.table import Table


@app.command(
    short_help="Compare methods on data sets, protocols and seeds.",
    epilog=example(
        "proxymetric study studies/glyphs.toml --dry-run",
        "proxymetric study studies/glyphs.toml --jobs 2 --minutes 9 --archive glyphs.tar.gz",
        "proxymetric study studies/glyphs.toml --collect glyphs.tar.gz --results results/glyphs",
        "proxymetric study studies/glyphs.toml --results results/glyphs --tables tables",
    ),
)
def study(
    file: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="What is compared.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the study; runs/study-<name> by default.")
    ] = None,
    data_root: Annotated[
        Path | None, typer.Option("--data-root", help="Folder that the study's data and weights lie in.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at once; by default 1, on a GPU 4.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Start only runs that fit; after so many minutes all save and stop.")
    ] = None,
    only: Annotated[str, typer.Option(metavar="ROW[,ROW]", help="Only these rows.")] = "",
    seeds: Annotated[str, typer.Option(metavar="0,1", help="Only these seeds.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and how long they take; run none.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Redo runs whose recipe or data changed; replace collected results.")
    ] = False,
    archive: Annotated[
        Path | None, typer.Option(metavar="FILE.tar.gz", help="Then put results, logs and best embeddings there.")
    ] = None,
    collect: Annotated[
        list[Path] | None,
        typer.Option(metavar="ARCHIVE", help="Run nothing: put an archive's or a study folder's results in --results."),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Small results, one file for each run, to be committed.")
    ] = None,
    embeddings: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --collect: put the embeddings there too.")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run nothing: make tables and plots of --results or --out.")
    ] = None,
) -> None:
    """Run all runs of a study that are not done yet; started again, it goes on where it was stopped or killed.

    Several runs share a GPU. A failed run fails the command after the others are done. Tables of all results so far
    are in the study's folder at the end.
    """
    from proxymetric.studies.command import Options, execute

    options = Options(
        study=file, out=out, data_root=data_root, jobs=jobs, minutes=minutes, only=only, seeds=seeds, dry_run=dry_run,
        overwrite=overwrite, archive=archive, collect=tuple(collect or ()), results=results, embeddings=embeddings,
        tables=tables,
    )  # fmt: skip
    code = execute(options, _Screen())
    if code:
        raise typer.Exit(code)


class _Screen:
    """Events as lines; on a terminal a table of the running runs below them."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = Console()
        self.live = Live(console=self.console, auto_refresh=False, transient=True)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=not self.console.is_terminal)

    def status(self, running: list[dict[str, Any]], summary: str) -> None:
        if self.console.is_terminal:
            if not self.live.is_started:
                self.live.start()
            self.live.update(running_table(running, summary), refresh=True)

    def close(self) -> None:
        self.live.stop()


def running_table(running: list[dict[str, Any]], summary: str) -> Table:
    """The runs that are under way."""
    from rich.table import Table

    from proxymetric.studies.reporting import clock

    table = Table(title=summary, title_justify="left")
    for name in ("run", "epoch", "step", "images/s", "time", "left"):
        table.add_column(name, justify="left" if name == "run" else "right", overflow="fold")
    for each in running:
        facts = [""] * 3
        left = "embeddings" if each["kind"] == "embed" else ""
        if "step" in each:
            facts = [f"{each['epoch']}/{each['epochs']}", f"{each['step']}/{each['steps']}",
                     f"{each['images_per_second']:,.0f}"]  # fmt: skip
            left = left or clock(each["seconds_left"])
        table.add_row(each["run"], *facts, clock(each["seconds"]), left)
    return table
