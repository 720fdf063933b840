"""Scores of continuations and greedy generation against transformers; lm_eval itself is in test_lm_eval_model.py."""

from typing import Any

import pytest
import torch

from tests.evaluate.conftest import HfFolder
from trainyard.core.errors import UserError
from trainyard.devices import select
from trainyard.evaluate.score_continuations import score_continuations
from trainyard.formats.hf import load_model
from trainyard.inference.build_engine import EngineShape, build_engine
from trainyard.inference.requests import Request, SamplingOptions
from trainyard.inference.scheduler import RequestScheduler, run_requests
from trainyard.parallel.process_group import Group

MAX_LENGTH = 40
PAIRS = [
    ([5], [6]),
    ([1, 2, 3], [4, 5, 6, 7]),
    ([1, 2, 3], [9]),
    ([1, 2, 3], [10]),  # the same inputs as the pair before
    (list(range(60)), [70, 71]),  # its first tokens do not fit
    ([8], list(range(100, 140))),  # as long as the limit
]


def reference_score(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    tokens = torch.tensor((context + continuation)[-(MAX_LENGTH + 1) :])
    with torch.no_grad():
        logprobs = model(tokens[None, :-1]).logits[0, -len(continuation) :].double().log_softmax(-1)
    labels = tokens[-len(continuation) :]
    return float(logprobs.gather(1, labels[:, None]).sum()), bool((logprobs.argmax(-1) == labels).all())


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_scores_are_those_of_transformers(hf_folder: HfFolder, family: str, batch_size: int) -> None:
    directory, reference = hf_folder(family)
    model: Any = load_model(directory, "cpu")[1]
    with torch.no_grad():
        greedy = int(reference(torch.tensor([[1, 2, 3]])).logits[0, -1].argmax())
    pairs = [*PAIRS, ([1, 2, 3], [greedy])]
    done: list[int] = []
    scores = score_continuations(model, pairs, MAX_LENGTH, batch_size, torch.device("cpu"), done.append)
    assert sum(done) == len(pairs)
    for pair, score in zip(pairs, scores, strict=True):
        logprob, is_greedy = reference_score(reference, *pair)
        assert score == (pytest.approx(logprob, abs=1e-4), is_greedy)
    assert scores[-1].is_greedy


@pytest.mark.parametrize(("pair", "message"), [(([1], []), "at least one token"), (([1], [2] * 41), "limit is 40")])
def test_impossible_pairs_are_refused(hf_folder: HfFolder, pair: Any, message: str) -> None:
    model: Any = load_model(hf_folder("llama")[0], "cpu")[1]
    with pytest.raises(UserError, match=message):
        score_continuations(model, [pair], MAX_LENGTH, 1, torch.device("cpu"))


def no_parameter(name: str) -> Any:
    raise AssertionError(name)


def test_greedy_tokens_of_a_model_that_shares_its_weights(hf_folder: HfFolder) -> None:
    directory, reference = hf_folder("llama")
    config, model = load_model(directory, "cpu")
    prompts = [[1, 2, 3], [7], list(range(1, 31))]  # 0 is padding in generate
    expected = []
    for prompt in prompts:
        tokens = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        expected.append(tokens[0, len(prompt) :].tolist())
    end = expected[1][4]  # the second sequence ends where this token first appears
    options = SamplingOptions(max_new_tokens=12, end_ids=frozenset([end]))
    requests = [Request(index, prompt, options) for index, prompt in enumerate(prompts)]
    parameters = dict(model.named_parameters())
    shape = EngineShape(2, config.max_positions, torch.float32)
    engine = build_engine(config, select("cpu"), Group(), shape, no_parameter, parameters)
    assert {p.data_ptr() for p in engine.model.parameters()} == {p.data_ptr() for p in model.parameters()}
    scheduler = RequestScheduler(engine, config.vocab)
    ended: list[None] = []
    found = run_requests(
        scheduler, requests, lambda index, tokens: index == 2 and len(tokens) == 3, lambda: ended.append(None)
    )
    until_end = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in expected]
    assert [found[index] for index in range(3)] == [until_end[0], until_end[1], until_end[2][:3]]
    assert len(ended) == 3
