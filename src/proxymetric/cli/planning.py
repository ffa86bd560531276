"""What something would take, before it is begun: plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from proxymetric.cli.root import app, example

if TYPE_CHECKING:
    from rich.table import Table

    from proxymetric.planning import Machine, Plan

MEMORY = 80 * 10**9
"""bytes of a device where none is found and none named"""


@app.command(
    short_help="Say what a loss over very many classes takes, before it is tried.",
    epilog=example(
        "proxymetric plan --classes 5_000_000 --dim 512 --batch 4096 --devices 8",
        "proxymetric plan --classes 10M --dim 512 --batch 4096 --dtype bfloat16 --device H200 --json",
    ),
)
def plan(
    classes: Annotated[str, typer.Option(metavar="C", help="Training classes: 5_000_000, 5e6 or 5M.")],
    dim: Annotated[str, typer.Option(metavar="D", help="Dimensions of the embedding.")] = "512",
    batch: Annotated[str, typer.Option(metavar="B", help="Embeddings in a step, of all devices together.")] = "4096",
    devices: Annotated[str, typer.Option(metavar="N", help="Devices that share the classes.")] = "1",
    per_class: Annotated[str, typer.Option("--per-class", metavar="K", help="Proxies of a class.")] = "1",
    method: Annotated[str, typer.Option("--method", "-m", help="A method with learned proxies.")] = "proxy-anchor",
    dtype: Annotated[str, typer.Option(help="Of the proxies: float32 or bfloat16.")] = "float32",
    optimizer: Annotated[str, typer.Option(help="Of the proxies: adamw, adam, sgd or rowwise-adagrad.")] = "adamw",
    implementation: Annotated[
        str, typer.Option(help="Of the loss: plain, chunked or triton; auto is triton on a GPU, chunked on a CPU.")
    ] = "auto",
    touched: Annotated[
        str, typer.Option(help="all; or another loss: batch, its classes alone; 0.1, and a tenth of the others.")
    ] = "all",
    memory: Annotated[
        str | None,
        typer.Option(metavar="GB", help="Of a device; by default that of --device or of the one here, else 80."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Whose rates are taken; by default the known one most like that here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: bytes and seconds.")] = False,
) -> None:
    """Memory of each device by part, time of a step from measured rates, whether it fits, and what would help.

    The encoder and its activations come on top: a smaller --memory leaves room for them. GB are 10^9 bytes.
    """
    from proxymetric import planning
    from proxymetric.planning import count

    available = None if memory is None else planning.gigabytes("memory", memory)
    machine, available, taken = _machine(device, available)
    work = planning.Workload(
        classes=count("classes", classes), dim=count("dim", dim), batch=count("batch", batch),
        devices=count("devices", devices), per_class=count("per_class", per_class), method=method, dtype=dtype,
        optimizer=optimizer, implementation=implementation, touched=planning.share("touched", touched),
        on_cpu=machine.is_cpu,
    )  # fmt: skip
    made = planning.plan(work, available, machine)
    if as_json:
        typer.echo(json.dumps(made.as_dict() | {"taken": taken}, indent=2))
    else:
        _show(made, taken)


def _machine(device: str | None, available: int | None) -> tuple[Machine, int, list[str]]:
    """Whose rates are taken, the bytes of a device, and in words where both come from."""
    from proxymetric.planning import machine, similar

    found, why = None, ""
    if device is not None:
        chosen = machine(device)
    else:
        from proxymetric.device import accelerator

        found = accelerator()
        chosen = similar(found and found[0])
        if found is None:
            why = ", as no accelerator was found here"
        elif found[0] != chosen.name:
            why = f", as none are measured on {found[0]}"
    words = [f"rates: those of {chosen.name}{why}"]
    if available is not None:
        words.append("memory: as asked for")
    elif found is not None:
        available = found[1]
        words.append(f"memory: that of {found[0]}, which was found here")
    elif device is not None and chosen.memory is not None:
        available = int(chosen.memory.value * 10**9)
        words.append(f"memory: that of {chosen.name} ({chosen.memory.origin()})")
    else:
        available = MEMORY
        words.append("memory: 80 GB are assumed; --memory says otherwise")
    return chosen, available, words


def _show(made: Plan, taken: list[str]) -> None:
    from rich.console import Console

    from proxymetric.planning import figure

    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)

    work = made.work
    proxies = "1 proxy" if work.per_class == 1 else f"{work.per_class} proxies"
    spread = "1 device" if work.devices == 1 else f"{work.devices:,} devices"
    say(f"{work.method}: {work.classes:,} classes of {proxies}, {work.dim:,}-D, batches of {work.batch:,}, on {spread}")
    console.print(_memory_table(made))
    left = f"{_gb(abs(made.available - made.total))} GB"
    of = f"{_gb(made.total)} of {_gb(made.available)} GB"
    if made.fits:
        say(f"it fits: {of}; {left} are left for the encoder, its activations and the rest")
    else:
        say(f"it does not fit: {of}; {left} too many, and the encoder comes on top")
    if made.most_classes is not None:
        say(f"classes that would fit, all else being the same: {made.most_classes:,}")
    console.print(_time_table(made))
    if work.devices > 1:
        say(f"received by a device in a step, not timed: {figure(made.duration.exchanged / 1e6)} MB")
    if made.advice:
        console.print(_advice_table(made))
    if not made.fits and not any(each.fits for each in made.advice):
        say("nothing of what is tried here makes it fit")
    for line in (*taken, *made.notes):
        say(line)


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name == "GB" else "left", overflow="fold")
    return table


def _memory_table(made: Plan) -> Table:
    from proxymetric.planning import chunk

    work = made.work
    share = -(-work.batch // work.devices)
    whole = work.implementation == "plain" or work.cached
    compared = work.compared if whole else chunk(work)
    rows = {
        "proxies": f"{work.rows:,} x {work.dim:,}, {work.dtype}",
        "gradient": f"{work.compared:,} x {work.dim:,}, {work.dtype}",
        "optimizer state": work.optimizer,
        "embeddings": f"{share:,} x {work.dim:,}, with their gradient",
        "gathered embeddings": f"{work.batch:,} x {work.dim:,}, with their gradient",
        "similarities": f"{work.implementation}, of {work.batch:,} x {compared:,}{'' if whole else ' at a time'}",
    }
    table = _table("memory of a device", "part", "of", "GB")
    for part, size in made.memory.items():
        if size:
            table.add_row(part, rows[part], _gb(size))
    table.add_row("total", "", _gb(made.total))
    return table


def _time_table(made: Plan) -> Table:
    table = _table("time of a step, without the encoder", "part", "time", "from")
    for part, span in (("loss", made.duration.loss), ("optimizer", made.duration.optimizer)):
        table.add_row(part, str(span), span.why)
    return table


def _advice_table(made: Plan) -> Table:
    table = _table("what would help", "change", "options", "GB", "fits")
    for each in made.advice:
        table.add_row(each.words, " ".join(each.options), _gb(each.total), "yes" if each.fits else "no")
    return table


def _gb(size: float) -> str:
    """Bytes as GB, to the megabyte where they are few.

    >>> _gb(6_196_000_000), _gb(16_777_216), _gb(80e9)
    ('6.20', '0.017', '80.00')
    """
    return f"{size / 1e9:,.3f}" if size < 1e9 else f"{size / 1e9:,.2f}"
