"""Show the user how a study proceeds: the protocol of reporters, and a reporter that prints lines."""

from __future__ import annotations

from typing import Any, Protocol


class Reporter(Protocol):
    """Shows the user how a study proceeds."""

    def say(self, text: str) -> None:
        """Show one event."""

    def answer(self, text: str) -> None:
        """Show a line of the result."""

    def status(self, running: list[dict[str, Any]], summary: str) -> None:
        """Show the current state; called several times a second.

        Args:
            running: one dictionary for each running job.
            summary: how many runs are done, and the time left.
        """

    def close(self) -> None:
        """Called once, at the end of the study."""


class Silent:
    """Shows nothing."""

    def say(self, text: str) -> None: ...

    def answer(self, text: str) -> None: ...

    def status(self, running: list[dict[str, Any]], summary: str) -> None: ...

    def close(self) -> None: ...


class Lines(Silent):
    """Prints each line of text and ignores the state between events."""

    def say(self, text: str) -> None:
        """Print an event."""
        print(text, flush=True)

    def answer(self, text: str) -> None:
        """Print a line of the result."""
        print(text, flush=True)
