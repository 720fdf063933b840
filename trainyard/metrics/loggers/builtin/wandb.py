"""Weights & Biases. Its environment variables (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, ...) have their usual meaning.

The id of the W&B run is that in run.json, so a resumed run continues the same curves. W&B drops values of steps that it
already has. In offline mode it cannot know them; they are read from the files that earlier starts of the run left.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainyard.core.errors import UserError
from trainyard.metrics.loggers.base import LoggedRun, LoggedSteps, Logger, scalar_tags

DEFAULT_PROJECT = "trainyard"
FINISH_TIMEOUT_S = 60.0
"""Seconds for uploads at the end of a run; `wandb sync` uploads the rest."""
EXIT_CODES = {"completed": 0, "interrupted": 130, "failed": 1}
logger = logging.getLogger(__name__)


class WandbLogger(Logger):
    def __init__(self) -> None:
        import numpy  # noqa: F401 - W&B imports it when it first needs it
        import wandb  # noqa: F401

        self.run: Any = None
        self.logged = LoggedSteps()
        self.last_step = 0

    @classmethod
    def check(cls) -> None:
        """Without credentials, W&B would ask for them in the terminal."""
        import wandb
        from requests.utils import get_netrc_auth

        settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
        keys = (settings.api_key, os.environ.get("WANDB_API_KEY"), os.environ.get("WANDB_IDENTITY_TOKEN_FILE"))
        if settings.mode in ("online", "shared") and not any(keys) and not get_netrc_auth(settings.base_url):
            raise UserError(
                "log.loggers=wandb: no API key for W&B; run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
            )

    def start(self, run: LoggedRun) -> None:
        import wandb

        # `check` starts a service in the process of the run. It ends with that process, so that nobody could report
        # the end of a killed run; without the variable, this process starts its own.
        os.environ.pop("WANDB_SERVICE", None)
        directory = Path(os.environ.get("WANDB_DIR") or run.directory)
        self.run = wandb.init(
            id=run.run_id,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            name=os.environ.get("WANDB_NAME") or run.directory.name,
            dir=str(directory),
            config=run.config,
            settings=wandb.Settings(silent=True, console="off", finish_timeout=FINISH_TIMEOUT_S),
        )
        logger.info("W&B run: %s", self.run.dir if self.run.offline else self.run.url)
        if self.run.offline:
            self.logged = steps_in_offline_runs(directory / "wandb", run.run_id)
        run.replay(self, self.logged.last if self.run.offline else self.run.starting_step)

    def log(self, step: int, record: dict[str, Any]) -> None:
        self._log(step, scalar_tags(record))

    def log_samples(self, step: int, records: list[dict[str, Any]]) -> None:
        from wandb import Table

        rows = [[record["prompt"], record["text"]] for record in records]
        self._log(step, {"samples": Table(columns=["prompt", "text"], data=rows)})

    def log_event(self, step: int, event: dict[str, Any]) -> None:
        if event["event"] not in ("start", "end"):  # W&B knows these itself
            self._log(step, {f"events/{event['event']}": 1})

    def close(self, outcome: str) -> None:
        if self.run:
            self.run.finish(exit_code=EXIT_CODES[outcome])

    def _log(self, step: int, values: dict[str, Any]) -> None:
        # Steps must not decrease: the record of a checkpoint comes when later steps are logged.
        if values := self.logged.new_values(step, values):
            self.last_step = max(self.last_step, step)
            self.run.log(values, step=self.last_step)


LOGGER = WandbLogger


def steps_in_offline_runs(directory: Path, run_id: str) -> LoggedSteps:
    """The last step in the files that offline runs with this id left."""
    for path in sorted(directory.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"), reverse=True):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout
        rows = [json.loads(line)["history"]["item"] for line in lines.splitlines() if '"type":"history"' in line]
        if last := max((row["_step"] for row in rows), default=0):
            names = {name.partition("._")[0] for row in rows if row["_step"] == last for name in row}
            return LoggedSteps(last, frozenset(names))
    return LoggedSteps()
