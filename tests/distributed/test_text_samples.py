"""Text samples do not depend on the layout: every layout continues prompts with the tokens of one rank."""

from typing import Any

import pytest

from tests.distributed.test_layouts import CASES, configure
from tests.support.pool import Pool
from trainyard.compat import supports_zero_bubble
from trainyard.verify.compare_layouts import single_rank_config

JOB = "tests.distributed.rank_jobs:continued_prompts"
PROMPTS = [[1, 2, 3], [250], [7] * 12, [9, 8, 7, 6, 5, 4, 3], [100, 101]]
"""More than a pipeline of four micro batches takes at once, and one that reaches data.seq_len."""
SAMPLES = {"max_new_tokens": 5, "top_p": 0.9, "tokenizer": "bytes"}
FAST = {
    "4-llama-tp4-sequence_parallelTrue-padded-vocab",
    "4-gpt-cp4-cp_methodall_gather-documents",
    "4-llama-pp2-zero3",
    "8-gpt-tp2-pp2-zero1-sequence_parallelTrue",
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
    single = single_rank_config(config)
    key = single.model_dump_json()
    if key not in references:
        references[key] = pool.run(JOB, (single, PROMPTS), 1)[0]
    results = pool.run(JOB, (config, PROMPTS), ranks)
    greedy, sampled = references[key]
    assert greedy != sampled
    assert [len(tokens) for tokens in greedy] == [min(5, config.data.seq_len - len(prompt)) for prompt in PROMPTS]
    assert all(result == [greedy, sampled] for result in results)
