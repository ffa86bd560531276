"""Training curves in MLflow (needs the extra `mlflow`)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from proxymetric.training.tracking.run_id import read_id, write_id
from proxymetric.training.tracking.tracker import Tracker, not_installed

EXPERIMENT = "proxymetric"
"""the experiment of the runs; the environment variable MLFLOW_EXPERIMENT_NAME overrides it"""
MAX_PARAMETERS_PER_CALL = 100
MAX_PARAMETER_LENGTH = 500
"""characters of a parameter that every store of MLflow takes"""


class MLflow(Tracker):
    """Logs to the server of `MLFLOW_TRACKING_URI`, or else to the folder `mlflow` of the run.

    Args:
        folder: the folder of the run.

    Raises:
        ValueError: MLflow is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import mlflow
        except ImportError:
            raise not_installed("mlflow", "mlflow") from None
        self._mlflow = mlflow
        self.folder = folder
        self._client: Any = None
        self._run_id = ""
        self._last_steps: dict[str, int] | None = None
        """the last step that a continued run has of a metric, as far as it was asked for; None: a new run"""

    def begin(self, step: int, settings: dict[str, Any]) -> None:
        """Start the run, or continue the run that this folder had."""
        place = os.environ.get("MLFLOW_TRACKING_URI")
        if not place:
            # MLflow asks for this permission before it writes to plain files, which need no database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            place = (self.folder.resolve() / "mlflow").as_uri()
        self._client = self._mlflow.MlflowClient(tracking_uri=place)
        run_id = read_id(self.folder, "mlflow") if step else None
        if run_id is not None:
            self._run_id, self._last_steps = run_id, {}
            self._client.update_run(run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run = self._client.create_run(experiment_id, run_name=self.folder.resolve().name)
        self._run_id = run.info.run_id
        write_id(self.folder, "mlflow", self._run_id)
        parameters = [
            self._mlflow.entities.Param(key, str(value)[:MAX_PARAMETER_LENGTH]) for key, value in settings.items()
        ]
        for i in range(0, len(parameters), MAX_PARAMETERS_PER_CALL):
            self._client.log_batch(self._run_id, params=parameters[i : i + MAX_PARAMETERS_PER_CALL])

    def record(self, step: int, numbers: dict[str, float]) -> None:
        """Log the numbers of a step, unless a killed run has logged them; MLflow does not allow `@` in names."""
        now = int(time.time() * 1000)
        named = {name.replace("@", "_at_").replace("=", "_"): float(number) for name, number in numbers.items()}
        metrics = [
            self._mlflow.entities.Metric(name, number, now, step)
            for name, number in named.items()
            if not self._is_logged(name, step)
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _is_logged(self, name: str, step: int) -> bool:
        """Whether the run had this point before it was continued; MLflow would keep both."""
        if self._last_steps is None:
            return False
        if name not in self._last_steps:
            points = self._client.get_metric_history(self._run_id, name)
            self._last_steps[name] = max((point.step for point in points), default=-1)
        return step <= self._last_steps[name]

    def end(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)
