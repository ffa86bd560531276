"""The command line: a thin layer over the library. Heavy imports stay inside the verbs."""

from __future__ import annotations

import os
import sys

import typer

from proxymetric.cli import catalogue, planning, studying, trained, training
from proxymetric.cli.root import app

__all__ = ["app", "main"]

VERBS = (
    training.train,
    trained.evaluate,
    trained.embed,
    trained.query,
    training.mlrc,
    studying.study,
    trained.export,
    trained.report,
    catalogue.methods,
    planning.plan,
)
"""in the order of `proxymetric --help`"""
app.registered_commands.sort(key=lambda verb: VERBS.index(verb.callback))


def main() -> None:
    """Run the command line; a person's mistake is one sentence and exit code 1."""
    # Threads that spin while they wait are several times slower as soon as anything else runs on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except (ValueError, OSError) as error:
        typer.echo(f"proxymetric: {error}", err=True)
        sys.exit(1)
    except RuntimeError as error:
        if not any(sign in str(error) for sign in ("out of memory", "can't allocate memory")):
            raise
        typer.echo("proxymetric: not enough memory; smaller --batch or --size need less", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("proxymetric: stopped", err=True)
        sys.exit(130)
