"""Text samples do not depend on the layout: every layout continues prompts with the tokens of one rank."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_layouts import CASES, configure
from tests.support import configs
from tests.support.pool import Pool
from trainyard.compat import supports_zero_bubble
from trainyard.config.schema import Config
from trainyard.preflight.verify import single_rank_config

JOBS = "tests.distributed.rank_jobs"
JOB = f"{JOBS}:continued_prompts"
PROMPTS = [[1, 2, 3], [250], [7] * 14, [9, 8, 7, 6, 5, 4, 3], [100, 101]]
"""More than a pipeline of four micro batches takes at once, and one that reaches data.seq_len."""
SAMPLES = {"max_new_tokens": 3, "top_p": 0.9, "tokenizer": "bytes"}
FAST = {
    "4-llama-tp4-sequence_parallelTrue-padded-vocab",
    "2-gpt-pp2-vpp2-pipeline_schedulezbv-tied",
}
SAMPLED_CASES = [
    pytest.param(*case.values, id=case.id, marks=() if case.id in FAST else pytest.mark.nightly)
    for case in CASES
    if case.values[2]["family"] != "bert" and "precision" not in case.values[3]
]


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    """Tokens of one rank by configuration."""
    return {}


def test_fast_cases_exist() -> None:
    assert {case.id for case in SAMPLED_CASES} >= FAST


@pytest.mark.parametrize(("ranks", "layout", "model", "sections"), SAMPLED_CASES)
def test_layout_continues_prompts_like_one_rank(
    pool: Pool,
    references: dict[str, Any],
    ranks: int,
    layout: dict[str, Any],
    model: dict[str, Any],
    sections: dict[str, Any],
) -> None:
    config = configure(layout, model, {**sections, "samples": SAMPLES})
    if config.layout.pipeline_schedule != "1f1b" and not supports_zero_bubble():
        pytest.skip("this schedule needs torch 2.13")
    prompts = [[token % config.model.vocab for token in prompt] for prompt in PROMPTS]
    single = single_rank_config(config)
    key = single.model_dump_json()
    if key not in references:
        references[key] = pool.run(JOB, (single, prompts), 1)[0]
    results = pool.run(JOB, (config, prompts), ranks)
    greedy, sampled = references[key]
    assert greedy != sampled
    assert [len(tokens) for tokens in greedy] == [min(3, config.data.seq_len - len(prompt)) for prompt in PROMPTS]
    assert all(result == [greedy, sampled] for result in results)


def run_config(tmp_path: Path, layout: dict[str, Any], **sections: dict[str, Any]) -> Config:
    samples = {**SAMPLES, "max_new_tokens": 5, "every": 2, "prompts": ["ab", "c"], "temperature": 1.0}
    log = {"directory": str(tmp_path), "name": f"ranks-{len(layout)}"}
    return configure(layout, configs.GPT, {"samples": samples, "log": log, "train": {"steps": 4}, **sections})


def test_a_run_of_several_ranks_writes_the_samples_of_one_rank(pool: Pool, tmp_path: Path) -> None:
    written = []
    for ranks, layout in ((1, {}), (4, {"pp": 2, "zero": 1})):
        config = run_config(tmp_path, layout)
        directories = {result["directory"] for result in pool.run(f"{JOBS}:run", (config,), ranks)}
        written.append((Path(directories.pop()) / "samples.jsonl").read_text())
        assert not directories
    assert written[0] == written[1]
    assert written[0].count("\n") == 4


def test_all_ranks_stop_between_tokens_if_one_is_asked(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(f"{JOBS}:stopped_between_tokens", (run_config(tmp_path, {"pp": 2}), 1), 2)
    assert results == [{"steps": 2, "interrupted": True, "polls": 3}] * 2
    assert not (tmp_path / "ranks-1/samples.jsonl").exists()


@pytest.mark.parametrize("layout", [{"tp": 2, "sequence_parallel": True}, {"pp": 2}], ids=["tp2", "pp2"])
@pytest.mark.nightly
def test_compiled_samples_equal_eager_samples_without_a_new_graph(
    pool: Pool, tmp_path: Path, layout: dict[str, Any]
) -> None:
    sections: dict[str, Any] = {
        "data": {"validation_fraction": 2e-6},
        "evaluate": {"every": 2, "batches": 1},
        "compile": {"enabled": True},
    }
    config = run_config(tmp_path, layout, **sections)
    for graphs in pool.run(f"{JOBS}:graphs_of_run", (config,), 2):
        assert graphs["end"] == graphs["evaluate"] > graphs["step"]
    eager = run_config(tmp_path / "eager", layout)
    pool.run(f"{JOBS}:run", (eager,), 2)
    name = f"ranks-{len(layout)}/samples.jsonl"
    assert (tmp_path / name).read_text() == (tmp_path / "eager" / name).read_text()
