"""MLflow. Its environment variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...) have their usual meaning.

The run directory keeps the id of the MLflow run, so a resumed run continues the same curves. MLflow would store a step
twice, so steps that it has are left out.
"""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import one_line
from trainyard.metrics.loggers.base import (
    LoggedRun,
    LoggedSteps,
    Logger,
    event_text,
    flat_config,
    scalar_tags,
)

DEFAULT_EXPERIMENT = "trainyard"
ID_FILE = "mlflow.json"
MAX_PARAM_CHARACTERS = 6000
MAX_PARAMS_PER_CALL = 100
STATUS = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
logger = logging.getLogger(__name__)


class MlflowLogger(Logger):
    def __init__(self) -> None:
        import mlflow.tracking  # noqa: F401

        self.client: Any = None
        self.run_id = ""
        self.logged = LoggedSteps()
        self.stores_files = True

    def start(self, run: LoggedRun) -> None:
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self.client = MlflowClient()
        self.run_id = self._find_run(run.directory / ID_FILE) or self._create_run(run)
        self.logged = self._logged_steps()
        run.replay(self, self.logged.last)

    def log(self, step: int, record: dict[str, Any]) -> None:
        self._log(step, scalar_tags(record), record.get("time"))

    def log_samples(self, step: int, records: list[dict[str, Any]]) -> None:
        texts = (f"{record['prompt']}{record['text']}\n" for record in records)
        self._log_text("\n".join(texts), f"samples/step_{step:08d}.txt")

    def log_event(self, step: int, event: dict[str, Any]) -> None:
        if event["event"] not in ("start", "end"):  # MLflow has its own state of a run
            self._log(step, {f"events/{event['event']}": 1}, event["time"])
            self.client.set_tag(self.run_id, f"events.{event['event']}", event_text(event)[:MAX_PARAM_CHARACTERS])

    def close(self, outcome: str) -> None:
        if self.run_id:
            self.client.set_terminated(self.run_id, STATUS[outcome])

    def _find_run(self, id_file: Path) -> str | None:
        """The id of the MLflow run that this run continues; None if there is none, or the server does not know it."""
        from mlflow.exceptions import MlflowException

        try:
            run_id = str(json.loads(id_file.read_text())["run_id"])
            self.client.update_run(run_id, "RUNNING")
        except (OSError, ValueError, LookupError, TypeError):
            return None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run_id

    def _create_run(self, run: LoggedRun) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT
        experiment = self.client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(name)
        tags = {"trainyard.run_id": run.run_id, "trainyard.directory": str(run.directory)}
        run_id: str = self.client.create_run(experiment_id, tags=tags, run_name=run.directory.name).info.run_id
        atomic_write_text(run.directory / ID_FILE, json.dumps({"run_id": run_id}))
        params = [Param(name, str(value)[:MAX_PARAM_CHARACTERS]) for name, value in flat_config(run.config).items()]
        for first in range(0, len(params), MAX_PARAMS_PER_CALL):
            self.client.log_batch(run_id, params=params[first : first + MAX_PARAMS_PER_CALL])
        return run_id

    def _logged_steps(self) -> LoggedSteps:
        """What MLflow has of the run. Training steps come before what else is logged about a step."""
        last = max((point.step for point in self.client.get_metric_history(self.run_id, "train/loss")), default=0)
        names = list(self.client.get_run(self.run_id).data.metrics) if last else []
        histories = {name: self.client.get_metric_history(self.run_id, name) for name in names}
        present = [name for name, points in histories.items() if any(point.step == last for point in points)]
        return LoggedSteps(last, frozenset(present))

    def _log(self, step: int, values: dict[str, float], at: float | None) -> None:
        from mlflow.entities import Metric

        milliseconds = int((at or time.time()) * 1000)
        new = self.logged.new_values(step, values)
        if new:
            self.client.log_batch(self.run_id, [Metric(name, value, milliseconds, step) for name, value in new.items()])

    def _log_text(self, text: str, file_name: str) -> None:
        """Store a text file. Where files are stored is separate from metrics, and may need other credentials."""
        if not self.stores_files:
            return
        try:
            self.client.log_text(self.run_id, text, file_name)
        except Exception as error:
            self.stores_files = False
            logger.warning("logger mlflow stores no text samples: %s: %s", type(error).__name__, one_line(error))


LOGGER = MlflowLogger
