"""How a plan of memory and time is printed: as text and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxymetric.runs.planning import Plan
    from proxymetric.system.tables import TextTable
    from proxymetric.system.terminal import Terminal


def show_plan(plan: Plan, terminal: Terminal) -> None:
    """Print a plan as text and tables."""
    from proxymetric.runs.planning import figure

    work = plan.work
    proxies = "1 proxy" if work.per_class == 1 else f"{work.per_class} proxies"
    spread = "1 device" if work.devices == 1 else f"{work.devices:,} devices"
    terminal.print(
        f"{work.method}: {work.classes:,} classes of {proxies}, {work.dim:,}-D, batches of {work.batch:,}, on {spread}"
    )
    terminal.show(_memory_table(plan))
    usage = f"{_gb(plan.total)} of {_gb(plan.available)} GB"
    difference = f"{_gb(abs(plan.available - plan.total))} GB"
    if plan.fits:
        terminal.print(f"it fits: {usage}; {difference} are left for the encoder, its activations and the rest")
    else:
        terminal.print(f"it does not fit: {usage}; {difference} too much, without the encoder")
    if plan.most_classes is not None:
        terminal.print(f"classes that would fit with everything else unchanged: {plan.most_classes:,}")
    terminal.show(_time_table(plan))
    if work.devices > 1:
        terminal.print(f"data that a device receives in a step, not timed: {figure(plan.duration.exchanged / 1e6)} MB")
    if plan.advice:
        terminal.show(_advice_table(plan))
    if not plan.fits and not any(each.fits for each in plan.advice):
        terminal.print("no change that was tried makes it fit")
    for line in (*plan.origins, *plan.notes):
        terminal.print(line)


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
