"""Generation with layers that keep a state instead of keys and values: Qwen3-Next against transformers, and a family
from outside the package without attention against its own whole texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inference.test_generate import MODELS, expected_tokens, load, random_prompts, run, run_prompts, save
from tests.support import configs
from trainyard import models
from trainyard.config.batch_invariance import model_conflict
from trainyard.devices.cpu import CpuDevice
from trainyard.inference import scheduler as scheduler_module
from trainyard.inference.build_engine import EngineShape, build_engine, cache_bytes
from trainyard.inference.requests import Request, SamplingOptions
from trainyard.inference.scheduler import RequestScheduler
from trainyard.models.init import initial_values
from trainyard.parallel.process_group import Group

NO_ATTENTION = {**configs.LLAMA, "family": "tests.support.decaying_sum:FAMILY", "max_positions": 128}


@pytest.fixture(scope="module")
def qwen3_next(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(2)
    return save(MODELS["qwen3_next"](), tmp_path_factory.mktemp("model"))


def test_long_prompts_in_chunks(qwen3_next: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are decoded between the chunks of a prompt must not disturb its state."""
    monkeypatch.setattr(scheduler_module, "PREFILL_CHUNK", 16)
    prompts = random_prompts(3, 70, 16, 17, 33, 2)
    expected = [expected_tokens(qwen3_next[1], prompt) for prompt in prompts]
    assert run_prompts(load(qwen3_next[0]), prompts) == expected


def test_captured_steps(qwen3_next: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step runs before it is captured, which must not advance the states."""
    prompts = random_prompts(1, 5, 17, 40, 90, 3, 64)
    expected = [expected_tokens(qwen3_next[1], prompt) for prompt in prompts]
    monkeypatch.setattr(CpuDevice, "supports_graphs", True)
    model = load(qwen3_next[0])
    model.scheduler.lookahead = 1  # a request is computed one token too far before its slot is free
    assert run_prompts(model, prompts) == expected


def test_common_beginnings_are_reused(qwen3_next: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A state cannot be cut at a token: a copy is kept where prompts go on."""
    monkeypatch.setattr(scheduler_module, "CPU_PREFILL_CHUNK", 8)
    (beginning,) = random_prompts(30)
    prompts = [[*beginning, *end] for end in random_prompts(1, 7, 3, 20)] + [beginning]
    model = load(qwen3_next[0], shares_prefixes=True)
    options = SamplingOptions(max_new_tokens=5)
    events = run(model, [Request(index, prompt, options) for index, prompt in enumerate(prompts)])
    for index, prompt in enumerate(prompts):
        assert [e.token for e in events[index]] == expected_tokens(qwen3_next[1], prompt, max_new_tokens=5)
    assert [events[index][0].cached_tokens for index in range(len(prompts))] == [0, 24, 24, 24, 0]


def make_engine(model: dict[str, Any], slots: int = 3) -> tuple[Any, Callable[[str], torch.Tensor]]:
    section = configs.tiny_config(model).model
    values = initial_values(models.blueprint_of(section), 1)
    shape = EngineShape(slots, 100, torch.float32)
    # Larger than initial weights, so that the greedy token depends on all tokens before it.
    return build_engine(section, CpuDevice(), Group(), shape, lambda name: values(name) * 8), values


def test_bits_that_depend_on_nothing_else_in_the_batch_are_refused() -> None:
    assert "recurrent layers" in model_conflict(configs.tiny_config(NO_ATTENTION).model)


def test_a_family_without_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "PREFILL_CHUNK", 8)
    engine, values = make_engine(NO_ATTENTION)
    section = configs.tiny_config(NO_ATTENTION).model
    model = models.fill_parameters(models.build_model(section), lambda name: values(name) * 8).eval()
    options = SamplingOptions(max_new_tokens=10)
    prompts = random_prompts(1, 30, 8, 9, 17)
    tokens = scheduler_module.run_requests(
        RequestScheduler(engine, section.vocab),
        [Request(index, prompt, options) for index, prompt in enumerate(prompts)],
        lambda *arguments: False,
    )
    for index, prompt in enumerate(prompts):
        text = list(prompt)
        for _ in range(10):
            batch = {"tokens": torch.tensor([text], dtype=torch.int32), "sample_ids": torch.zeros(1, dtype=torch.int32)}
            with torch.no_grad():
                text.append(int(model(batch | {"rng_key": torch.zeros(2, dtype=torch.int32)}).logits()[0, -1].argmax()))
        assert tokens[index] == text[len(prompt) :]


@pytest.mark.parametrize("name", ["qwen3_next", "none"])
def test_bytes_of_a_cache_are_those_that_an_engine_has(name: str, qwen3_next: tuple[Path, Any]) -> None:
    if name == "none":
        engine, section = make_engine(NO_ATTENTION)[0], configs.tiny_config(NO_ATTENTION).model
    else:
        model = load(qwen3_next[0], max_seq_len=100)
        engine, section = model.scheduler.engine, model.model_config
    engine.keep_state(0)  # which makes copies of states
    caches = [buffer.nbytes for key, buffer in engine.model.named_buffers() if "_cache" in key or ".state" in key]
    copies = [kept.nbytes for _, kept in engine._rings]
    assert sum(caches + copies) == cache_bytes(section, 1, 3, 100, 4, False)
