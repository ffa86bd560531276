"""The command line: a thin layer over the library. The verbs import slow modules when they run."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from typing import TextIO

import typer
from typer.main import get_command_name
from typer.models import CommandInfo

from proxymetric.cli import (
    caching,
    catalogue,
    evaluating,
    identifying,
    inspecting,
    searching,
    serving,
    studying,
    trained,
    training,
    upkeep,
)
from proxymetric.cli.root import app
from proxymetric.system import faults
from proxymetric.system.text import visible

__all__ = ["app", "main"]

VERBS = (
    training.demo,
    training.train,
    evaluating.evaluate,
    inspecting.inspect,
    searching.index,
    searching.search,
    serving.serve,
    trained.embed,
    studying.study,
    catalogue.methods,
    trained.export,
    caching.cache,
)
"""the verbs, in the order of `proxymetric --help`"""
PARTS = (identifying.add_class, identifying.remove, upkeep.metadata, upkeep.switch, upkeep.verify, upkeep.compact)
"""what follows the word `index`; its help names them"""
FOR_SEVERAL_PROCESSES = (training.train, evaluating.evaluate, catalogue.methods)
"""the verbs that may run under torchrun"""
app.registered_commands.sort(key=lambda verb: (*VERBS, *PARTS).index(verb.callback))


def main() -> None:
    """Run the command line; an error of the user or of the machine prints one sentence and exits with code 1."""
    # Threads that wait actively are several times slower when other programs run on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    faults.quiet_loaders()
    warnings.showwarning = _show_warning
    try:
        program = _of_one_verb(sys.argv[1:])
        if len(program.registered_commands) == 1:
            _check_processes(program.registered_commands[0], sys.argv[1])
        program()
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        message = faults.sentence(error, sys.argv[1] if len(sys.argv) > 1 else "")
        if message is None:
            raise
        # What the processes refuse, they refuse again when torchrun starts them again.
        _say(visible(message, keep=chr(10)), each_start=not isinstance(error, ValueError))
        sys.exit(1)
    except KeyboardInterrupt:
        _say("stopped", each_start=True)
        sys.exit(130)


def _say(sentence: str, each_start: bool) -> None:
    """Print a sentence on the error stream; of the processes of torchrun that have the same one, only one prints it."""
    with faults.said_once(sentence, each_start) as is_first:
        if is_first:
            typer.echo(f"proxymetric: {sentence}", err=True)


def _of_one_verb(words: list[str]) -> typer.Typer:
    """The program with only the verb that `words` begin with, if there is such a verb: a fifth of the start-up time
    goes into the parsers of all the others."""
    one = copy.copy(app)
    for name in (" ".join(words[:2]), *words[:1]):  # `index remove` is a verb of two words
        verbs = [
            verb
            for verb in app.registered_commands
            if verb.callback and name == (verb.name or get_command_name(verb.callback.__name__))
        ]
        if verbs:
            one.registered_commands = verbs
            break
    return one


def _check_processes(verb: CommandInfo, name: str) -> None:
    """Refuse several processes for a verb that has no work for them: each would do the whole of it, to the same files.

    Some schedulers set WORLD_SIZE alone, which says nothing about this command.
    """
    size, others = os.environ.get("WORLD_SIZE", ""), ("RANK", "MASTER_ADDR", "MASTER_PORT")
    is_group = size.isdecimal() and int(size) > 1 and all(variable in os.environ for variable in others)
    if is_group and verb.callback not in FOR_SEVERAL_PROCESSES:
        raise ValueError(
            f"{name}: got {size} processes from torchrun (WORLD_SIZE={size}), expected one: start it without torchrun"
        )


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as a sentence, without the line of code that Python adds; --quiet leaves it out."""
    from proxymetric.system.terminal import volume

    if volume().quiet:
        return
    _say(f"warning: {visible(str(message), keep=chr(10))}", each_start=True)
