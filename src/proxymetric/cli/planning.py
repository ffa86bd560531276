"""The verb that estimates memory and time before training: plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from proxymetric.arguments.own_code import trusting
from proxymetric.cli.root import app, example

if TYPE_CHECKING:
    from proxymetric.runs.planning import Machine, Plan
    from proxymetric.system.tables import TextTable

DEFAULT_MEMORY_BYTES = 80 * 10**9
"""memory of a device if --memory, --device and this machine's GPU do not give it"""


@app.command(
    short_help="Estimate memory and time of a loss over very many classes.",
    epilog=example(
        "proxymetric plan --classes 5_000_000 --dim 512 --batch 4096 --devices 8",
        "proxymetric plan --classes 10M --dim 512 --batch 4096 --dtype bfloat16 --device H200 --json",
    ),
)
def plan(
    ctx: typer.Context,
    classes: Annotated[str, typer.Option(metavar="C", help="Number of training classes: 5_000_000, 5e6 or 5M.")],
    dim: Annotated[str, typer.Option(metavar="D", help="Dimensions of the embedding.")] = "512",
    batch: Annotated[
        str, typer.Option(metavar="B", help="Number of embeddings in a step, on all devices together.")
    ] = "4096",
    devices: Annotated[str, typer.Option(metavar="N", help="Number of devices that share the classes.")] = "1",
    per_class: Annotated[str, typer.Option("--per-class", metavar="K", help="Proxies per class.")] = "1",
    method: Annotated[str, typer.Option("--method", "-m", help="A method with learned proxies.")] = "proxy-anchor",
    dtype: Annotated[str, typer.Option(help="Type of the proxies: float32 or bfloat16.")] = "float32",
    optimizer: Annotated[
        str, typer.Option(help="Optimiser of the proxies: adamw, adam, sgd or rowwise-adagrad.")
    ] = "adamw",
    implementation: Annotated[
        str,
        typer.Option(
            help="Implementation of the loss: plain, chunked or triton. auto: triton on a GPU, chunked on a CPU."
        ),
    ] = "auto",
    touched: Annotated[
        str,
        typer.Option(
            help="Classes that a step compares with: all; batch (the classes of the batch); or 0.1 (those and a tenth "
            "of the others). Any value but all changes the loss."
        ),
    ] = "all",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="GB", help="Memory of a device. Default: the memory of --device, or of this machine's GPU, or 80."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device whose measured rates are used. Default: the one most similar to this machine's device."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = False,
) -> None:
    """Estimate the memory of each device, whether the classes fit, the time of a step, and which changes would help.

    Times are computed from measured rates. The encoder and its activations are not included: a smaller --memory leaves
    room for them. 1 GB is 10^9 bytes.
    """
    from proxymetric.runs import planning
    from proxymetric.runs.planning import count

    ctx.with_resource(trusting(method))
    available = None if memory is None else planning.gigabytes("memory", memory)
    machine, available, origins = _machine(device, available)
    work = planning.Workload(
        classes=count("classes", classes),
        dim=count("dim", dim),
        batch=count("batch", batch),
        devices=count("devices", devices),
        per_class=count("per_class", per_class),
        method=method,
        dtype=dtype,
        optimizer=optimizer,
        implementation=implementation,
        touched=planning.share("touched", touched),
        on_cpu=machine.is_cpu,
    )
    estimate = planning.plan(work, available, machine)
    if as_json:
        typer.echo(json.dumps(estimate.as_dict() | {"taken": origins}, indent=2))
    else:
        _show(estimate, origins)


def _machine(device: str | None, available: int | None) -> tuple[Machine, int, list[str]]:
    """Return the machine whose rates are used, the memory of a device in bytes, and the origin of both in words."""
    from proxymetric.runs.planning import machine, similar

    gpu = None
    reason = ""
    if device is not None:
        measured = machine(device)
    else:
        from proxymetric.system.device import accelerator

        gpu = accelerator()
        measured = similar(gpu and gpu[0])
        if gpu is None:
            reason = ", because this machine has no GPU"
        elif gpu[0] != measured.name:
            reason = f", because none were measured on {gpu[0]}"
    origins = [f"rates: measured on {measured.name}{reason}"]
    if available is not None:
        origins.append("memory: from --memory")
    elif gpu is not None:
        available = gpu[1]
        origins.append(f"memory: of {gpu[0]}, the GPU of this machine")
    elif device is not None and measured.memory is not None:
        available = int(measured.memory.value * 10**9)
        origins.append(f"memory: of {measured.name} ({measured.memory.origin()})")
    else:
        available = DEFAULT_MEMORY_BYTES
        origins.append("memory: 80 GB is assumed; --memory changes it")
    return measured, available, origins


def _show(plan: Plan, origins: list[str]) -> None:
    """Print a plan as text and tables."""
    from rich.console import Console

    from proxymetric.runs.planning import figure
    from proxymetric.system.tables import show

    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=not console.is_terminal)

    work = plan.work
    proxies = "1 proxy" if work.per_class == 1 else f"{work.per_class} proxies"
    spread = "1 device" if work.devices == 1 else f"{work.devices:,} devices"
    say(f"{work.method}: {work.classes:,} classes of {proxies}, {work.dim:,}-D, batches of {work.batch:,}, on {spread}")
    show(console, _memory_table(plan))
    usage = f"{_gb(plan.total)} of {_gb(plan.available)} GB"
    difference = f"{_gb(abs(plan.available - plan.total))} GB"
    if plan.fits:
        say(f"it fits: {usage}; {difference} are left for the encoder, its activations and the rest")
    else:
        say(f"it does not fit: {usage}; {difference} too much, without the encoder")
    if plan.most_classes is not None:
        say(f"classes that would fit with everything else unchanged: {plan.most_classes:,}")
    show(console, _time_table(plan))
    if work.devices > 1:
        say(f"data that a device receives in a step, not timed: {figure(plan.duration.exchanged / 1e6)} MB")
    if plan.advice:
        show(console, _advice_table(plan))
    if not plan.fits and not any(each.fits for each in plan.advice):
        say("no change that was tried makes it fit")
    for line in (*origins, *plan.notes):
        say(line)


def _table(title: str, *columns: str) -> TextTable:
    from proxymetric.system.tables import TextTable

    return TextTable(title, list(columns), left=tuple(name for name in columns if name != "GB"))


def _memory_table(plan: Plan) -> TextTable:
    from proxymetric.runs.planning import chunk

    work = plan.work
    share = -(-work.batch // work.devices)
    at_once = work.implementation == "plain" or work.cached
    compared = work.compared if at_once else chunk(work)
    rows = {
        "proxies": f"{work.rows:,} x {work.dim:,}, {work.dtype}",
        "gradient": f"{work.compared:,} x {work.dim:,}, {work.dtype}",
        "optimizer state": work.optimizer,
        "embeddings": f"{share:,} x {work.dim:,}, with their gradient",
        "gathered embeddings": f"{work.batch:,} x {work.dim:,}, with their gradient",
        "optimizer step": f"{work.optimizer}, two temporary copies of {work.rows:,} x {work.dim:,}",
        "similarities": f"{work.implementation}, of {work.batch:,} x {compared:,}{'' if at_once else ' at a time'}",
    }
    table = _table("memory of a device", "part", "content", "GB")
    for part, size in plan.memory.items():
        if size:
            table.add(part, rows[part], _gb(size))
    table.add("total", "", _gb(plan.total))
    return table


def _time_table(plan: Plan) -> TextTable:
    table = _table("time of a step, without the encoder", "part", "time", "computed from")
    for part, span in (("loss", plan.duration.loss), ("optimizer", plan.duration.optimizer)):
        table.add(part, str(span), span.why)
    return table


def _advice_table(plan: Plan) -> TextTable:
    table = _table("what would help", "change", "options", "GB", "fits")
    for each in plan.advice:
        table.add(each.words, " ".join(each.options), _gb(each.total), "yes" if each.fits else "no")
    return table


def _gb(size: float) -> str:
    """Return bytes as GB, with two decimals, or with three below 1 GB.

    Example:
        >>> _gb(6_196_000_000), _gb(16_777_216), _gb(80e9)
        ('6.20', '0.017', '80.00')
    """
    return f"{size / 1e9:,.3f}" if size < 1e9 else f"{size / 1e9:,.2f}"
