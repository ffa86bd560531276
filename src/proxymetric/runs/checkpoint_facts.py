"""What a run stores in its checkpoint besides the state of the training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from proxymetric.runs.clear_gain import ClassScores


@dataclass
class CheckpointFacts:
    """What a run stores in its checkpoint besides the state of the training.

    Attributes:
        bad: images that could not be read, with the reason; it grows during the run.
        baselines: the scores before training; None in a refit.
        candidates: what the untrained model and closed forms score on the held-out classes (`runs.simplest`); None
            where they are no candidates.
        weights: the weights file and what its header changed; None without such a file.
        closed_form: what the head was computed with before training (`runs.closed_form.Fit`); None for a random head.
        fewer_classes: the scores before training among fewer classes; None in a refit.
        earlier_seconds: time that earlier processes spent on the run.
        clock: seconds since this process began.
    """

    bad: dict[str, str]
    baselines: dict[str, dict[str, float]] | None
    weights: dict[str, Any] | None
    earlier_seconds: float
    clock: Callable[[], float]
    closed_form: dict[str, Any] | None = None
    candidates: ClassScores | None = None
    fewer_classes: dict[str, list[Any]] | None = None

    @property
    def seconds(self) -> float:
        """Time that this process and all earlier ones spent on the run."""
        return self.earlier_seconds + self.clock()

    def as_dict(self) -> dict[str, Any]:
        """The facts as the checkpoint stores them."""
        facts: dict[str, Any] = {"bad": self.bad, "before": self.baselines, "weights": self.weights}
        facts |= {"closed_form": self.closed_form, "fewer_classes": self.fewer_classes}
        facts |= {"candidates": None if self.candidates is None else self.candidates._asdict()}
        return {key: value for key, value in facts.items() if value is not None} | {"seconds": self.seconds}
