"""The verb that trains many runs: study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxymetric.cli.results import AsJson
from proxymetric.cli.root import TrustCode, app, example

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
    file: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="TOML file that describes the study.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the study. Default: runs/study-<name>.")
    ] = None,
    data_root: Annotated[
        Path | None, typer.Option("--data-root", help="Folder with the data and weights of the study.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at the same time. Default: 1, or 4 on a GPU.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Stop after this time: start only runs that will finish by then; save those that do not."),
    ] = None,
    only: Annotated[str, typer.Option(metavar="ROW[,ROW]", help="Run only these rows of the study.")] = "",
    seeds: Annotated[str, typer.Option(metavar="0,1", help="Run only these seeds.")] = "",
    data: Annotated[str, typer.Option(metavar="NAME[,NAME]", help="Run only on these data sets of the study.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and their times; run nothing.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Repeat runs whose recipe or data changed; replace collected results.")
    ] = False,
    archive: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.tar.gz", help="After each run write results, logs and best embeddings to this archive."
        ),
    ] = None,
    collect: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="ARCHIVE", help="Run nothing; copy the results of an archive or study folder to --results."
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of collected results. A run of a study goes on from the draws that lie there."
        ),
    ] = None,
    embeddings: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --collect: copy the embeddings to this folder.")
    ] = None,
    tables: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run nothing; write tables and plots of --results or --out to this folder."),
    ] = None,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Train all runs of a study that are not finished. The same command continues a study that was stopped or killed.

    Several runs share a GPU. If a run fails, the others continue, and the command fails at the end. The tables of all
    results so far are written to the folder of the study.
    """
    options = {name: value for name, value in locals().items() if value is not None}
    as_json = options.pop("as_json")
    import proxymetric as pm

    screen = Screen(quiet=as_json)
    result = pm.study(**options, reporter=screen)
    if as_json:
        screen.terminal.dump(result.as_dict())
    if result.code:
        raise typer.Exit(result.code)


class Screen:
    """Prints events as lines and, in a terminal, a table of the current runs below them.

    Args:
        quiet: print no lines of the result.
    """

    def __init__(self, quiet: bool = False) -> None:
        from rich.live import Live

        from proxymetric.system.terminal import Terminal

        self.terminal, self.quiet = Terminal(), quiet
        self.live = Live(console=self.terminal.console, auto_refresh=False, transient=True)

    def say(self, text: str) -> None:
        self.terminal.say(text)

    def answer(self, text: str) -> None:
        if not self.quiet:
            self.terminal.print(text)

    def status(self, running: list[dict[str, Any]], summary: str) -> None:
        if self.terminal.live:
            if not self.live.is_started:
                self.live.start()
            self.live.update(running_table(running, summary), refresh=True)

    def close(self) -> None:
        self.live.stop()


def running_table(running: list[dict[str, Any]], summary: str) -> Table:
    """Make a table of the current runs."""
    from proxymetric.system.clock import clock
    from proxymetric.system.tables import TextTable

    table = TextTable(summary, ["run", "epoch", "step", "images/s", "time", "left"], left=("run",))
    for each in running:
        facts = [""] * 3
        time_left = "embeddings" if each["kind"] == "embed" else ""
        if "step" in each:
            facts = [
                f"{each['epoch']}/{each['epochs']}",
                f"{each['step']}/{each['steps']}",
                f"{each['images_per_second']:,.0f}",
            ]
            time_left = time_left or clock(each["seconds_left"])
        elif "what" in each:  # features of the images, or another thing that is done before training
            facts = [each["what"].split(":")[0], f"{each['done']}/{each['total']}", ""]
            time_left = time_left or each["facts"]
        table.add(each["run"], *facts, clock(each["seconds"]), time_left)
    return table
