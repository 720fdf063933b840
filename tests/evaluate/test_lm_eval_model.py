"""The model class for lm-evaluation-harness, with the real package and its own class for transformers as reference."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.evaluate.conftest import HfFolder

ROOT = Path(__file__).parents[2]
DOCUMENTS: dict[str, list[dict[str, Any]]] = {
    "choice": [
        {"question": f"The {subject} fox {verb}", "choices": [" jumps", " numbers over", " dog.", "!"], "answer": index}
        for index, (subject, verb) in enumerate([("quick", "is"), ("brown", "was"), ("lazy", "over the"), ("", "")])
    ],
    "rolling": [{"text": "The quick brown fox jumps. " * count + "Déjà vu"} for count in (1, 3, 9, 30)],
    "generate": [{"question": text} for text in ("The quick", "numbers 1 2", "short", "a very long prompt " * 9)],
}
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "x",
        "generation_kwargs": {"until": ["5"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def python() -> str:
    """The Python of an environment with lm_eval."""
    done = subprocess.run(
        [ROOT / "scripts/lm_eval_environment"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def task_directory(tmp_path: Path) -> Path:
    for name, documents in DOCUMENTS.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(document) + "\n" for document in documents))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"task": f"local_{name}", **source, **TASKS[name]}))
    return tmp_path


def run(python: str, *arguments: str | Path) -> Any:
    """Run a Python program in the environment; returns the JSON document that it prints last."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run([python, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_results_are_those_of_the_class_for_transformers(
    python: str, task_directory: Path, hf_folder: HfFolder, family: str
) -> None:
    tasks = [f"local_{name}" for name in TASKS]
    report = run(python, ROOT / "tests/evaluate/lm_eval_tasks.py", hf_folder(family)[0], task_directory, *tasks)
    expected, found = report["hf"], report["trainyard"]
    for task in ("local_choice", "local_rolling"):
        for wanted, ours in zip(expected["samples"][task], found["samples"][task], strict=True):
            assert flatten(ours) == pytest.approx(flatten(wanted), abs=1e-4, rel=1e-7)
    assert found["samples"]["local_generate"] == expected["samples"]["local_generate"]
    assert len({str(sample) for sample in found["samples"]["local_generate"]}) > 1
    for task in tasks:
        numbers = {name: value for name, value in expected["results"][task].items() if isinstance(value, float)}
        assert {name: found["results"][task][name] for name in numbers} == pytest.approx(numbers, rel=1e-4)
        assert numbers


@pytest.mark.nightly
def test_command_runs_tasks(python: str, task_directory: Path, hf_folder: HfFolder) -> None:
    options = ["--tasks", "local_choice,local_rolling", "--include-path", str(task_directory), "--limit", "3", "--json"]
    command = ["-m", "trainyard", "eval", str(hf_folder("llama")[0]), *options]
    report = run(python, *command)
    assert report["n-samples"]["local_choice"]["effective"] == 3
    two_ranks = run(python, *command, "--nproc", "2", "layout.tp=2")
    bits = [each["results"]["local_rolling"]["bits_per_byte,none"] for each in (report, two_ranks)]
    assert bits[1] == pytest.approx(bits[0], rel=1e-5)
    wrong = [python, *command[:4], "--tasks", "hellaswg"]
    done = subprocess.run(wrong, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--tasks hellaswg: no such task; nearest: hellaswag" in done.stderr


def flatten(value: Any) -> list[float]:
    return [number for item in value for number in flatten(item)] if isinstance(value, list) else [float(value)]
