"""Runs the same tasks with lm-evaluation-harness's class for transformers and with ours; prints both as JSON.

    python tests/evaluate/lm_eval_tasks.py FOLDER TASK_DIRECTORY TASK...

Runs in the environment of scripts/lm_eval_environment.
"""

import json
import sys
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import trainyard.evaluate.lm_eval_model  # noqa: F401  registers the class


def main(folder: str, task_directory: str, *tasks: str) -> None:
    manager = TaskManager(include_path=task_directory)
    report: dict[str, Any] = {}
    for name, arguments in (("hf", {"dtype": "float32"}), ("trainyard", {})):
        output = simple_evaluate(
            name,
            {"pretrained": folder, **arguments},
            tasks=list(tasks),
            task_manager=manager,
            batch_size=3,
            device="cpu",
            bootstrap_iters=0,
        )
        samples = {
            task: [sample["resps"] for sample in sorted(output["samples"][task], key=lambda sample: sample["doc_id"])]
            for task in tasks
        }
        report[name] = {"results": output["results"], "samples": samples}
    print(json.dumps(report, default=float))


if __name__ == "__main__":
    main(*sys.argv[1:])
