"""Runs tasks of lm-evaluation-harness on a checkpoint."""

import difflib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from trainyard.core.errors import UserError
from trainyard.evaluate.checkpoint_source import CheckpointSource
from trainyard.evaluate.evaluator import Evaluator
from trainyard.evaluate.lm_eval_model import TrainyardLM, load_hf_tokenizer


def run_tasks(
    source: CheckpointSource,
    tasks: Sequence[str],
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """Results and versions of tasks, by the names of the harness.

    All ranks call this; the first rank of each host gets the results, the others nothing.
    """
    manager = TaskManager(include_path=str(include_path) if include_path else None)
    for name in tasks:
        if not name.endswith(".yaml") and not manager.match_tasks([name]):
            close = difflib.get_close_matches(name, manager.all_tasks, 3)
            raise UserError(f"--tasks {name}: no such task; nearest: {', '.join(close) or 'see lm_eval ls tasks'}")
    config, weights = source.config, source.opened.weights
    evaluator = Evaluator(config, weights, source.world, on_progress=source.on_progress)
    model = TrainyardLM(evaluator, tokenizer or load_hf_tokenizer(weights, source.path), config.train.micro_batch)
    if evaluator.mesh.layout_rank:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    results = simple_evaluate(
        model, tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False
    )
    if results is None:
        return {}
    return {key: results[key] for key in ("results", "groups", "versions", "n-shot", "n-samples") if key in results}
