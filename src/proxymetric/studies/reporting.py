"""Show the user how a study proceeds: the protocol of reporters, and a reporter that prints lines."""

from __future__ import annotations

from typing import Any, Protocol


class Reporter(Protocol):
    """Shows the user how a study proceeds."""

    def say(self, text: str) -> None:
        """Show one event."""

    def status(self, running: list[dict[str, Any]], summary: str) -> None:
        """Show the current state; called several times a second.

        Args:
            running: one dictionary for each running job.
            summary: how many runs are done, and the time left.
        """

    def close(self) -> None:
        """Called once, at the end of the study."""


class Lines:
    """Prints each event as a line of text and ignores the state between events."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def status(self, running: list[dict[str, Any]], summary: str) -> None: ...

    def close(self) -> None: ...
