"""Prompts that begin alike share keys and values, and their texts are bit for bit what they are without that."""

import random
from pathlib import Path

import pytest
import torch

from tests.inference import test_generate
from tests.inference.test_generate import LLAMA, MODELS, run, save
from tests.support.hf_reference import hf_model
from trainyard.inference import scheduler as scheduler_module
from trainyard.inference.load import InferenceModel
from trainyard.inference.prefix_cache import PrefixCache
from trainyard.inference.requests import Request, SamplingOptions, TokenEvent

UNIT = 8


WINDOWS = {"sliding_window": 7, "max_position_embeddings": 128}


@pytest.fixture(
    scope="module",
    params=["llama", "windows", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gpt", "qwen3_next"))],
)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    model = hf_model("mistral", **LLAMA | WINDOWS) if request.param == "windows" else MODELS[request.param]()
    return save(model, tmp_path_factory.mktemp("model"))[0]


@pytest.fixture(autouse=True)
def _small_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "CPU_PREFILL_CHUNK", UNIT)


def load(directory: Path, **options: int) -> InferenceModel:
    return test_generate.load(directory, shares_prefixes=True, **options)


def request_for(number: int, prompt: list[int]) -> Request:
    """Half of them are sampled, some are short. The options follow from the prompt."""
    new_tokens = (1, 4, 25)[len(prompt) % 3]
    options = SamplingOptions(float(prompt[-1] % 2), seed=5, max_new_tokens=new_tokens, num_logprobs=2)
    return Request(number, prompt, options)


def run_schedule(model: InferenceModel) -> tuple[list[list[TokenEvent]], int]:
    """Requests come, end and are cancelled in random order, in all slots. Returns their events without the number of
    reused tokens, and the sum of these."""
    rng = random.Random(3)
    beginnings = [[rng.randrange(256) for _ in range(60)] for _ in range(3)]
    events: dict[int, list[TokenEvent]] = {}
    while len(events) < 50 or model.scheduler.has_work:
        for _ in range(rng.choice([0, 0, 0, 0, 0, 1])):  # slots are often free while others are not
            kept = rng.choice([5, 8, 20, 24, 33, 60])
            prompt = rng.choice(beginnings)[:kept] + [rng.randrange(8) for _ in range(rng.randrange(1, 3))]
            if len(events) < 50:
                model.scheduler.add(request_for(len(events), prompt))
                events[len(events)] = []
        if rng.random() < 0.1:
            model.scheduler.cancel(rng.randrange(50))
        for event in model.scheduler.step():
            events[event.request_id].append(event)
    reused = sum(found[0].cached_tokens for found in events.values() if found)
    return [[event._replace(cached_tokens=0) for event in found] for found in events.values()], reused


def test_texts_are_bit_for_bit_those_without_reuse(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, reused = run_schedule(load(directory))
    monkeypatch.setattr(PrefixCache, "longest", lambda *arguments: (0, 0))
    expected, never_reused = run_schedule(load(directory))
    assert found == expected  # log-probabilities, too
    assert reused > 150
    assert never_reused == 0


def cached_tokens(model: InferenceModel, *prompts: list[int]) -> list[int]:
    """Of prompts that are run one after the other."""
    return [run(model, [request_for(number, prompt)])[number][0].cached_tokens for number, prompt in enumerate(prompts)]


def test_how_much_is_reused(directory: Path) -> None:
    one, two = list(range(50)), list(range(100, 150))
    model = load(directory, max_batch=2)
    shorter = (0, 0) if model.scheduler.engine.has_rings else (24, 8)
    expected = [0, 48, shorter[0], 0, shorter[1], 0]
    assert cached_tokens(model, one, one, [*one[:30], 1], one[:8], one[:9], [2, *one]) == expected
    # Prompts that take turns do not displace each other while slots are free.
    assert cached_tokens(load(directory, max_batch=3), one, two, one, two, one) == [0, 0, 48, 48, 48]
    assert cached_tokens(load(directory, max_batch=2), one, two, one) == [0, 0, 48]
    assert cached_tokens(load(directory, max_batch=1), one, two, one) == [0, 0, 0]
    together = run(load(directory, max_batch=3), [request_for(number, one) for number in range(3)])
    assert [together[number][0].cached_tokens for number in range(3)] == [0, 48, 48]


def test_rings_are_kept_where_prompts_go_on_or_part(directory: Path) -> None:
    """The next turn of a chat begins with all whole units of the one before; of prompts that share a beginning, the
    third one does."""
    one, model = list(range(50)), load(directory, max_batch=6)
    # A slot without rings goes on with the part that it shares, and loses the rest.
    first, last = (0, 48) if model.scheduler.engine.has_rings else (24, 24)
    prompts = (one, [*one, 1, 2], [*one[:30], 1], [*one[:30], 2], [*one[:30], 3, *one], one)
    assert cached_tokens(model, *prompts) == [0, 48, first, 24, 24, last]


def test_prompts_of_one_unit_are_computed_together(directory: Path) -> None:
    model = load(directory)
    assert cached_tokens(model, [1] * UNIT, [1] * UNIT) == [0, 0]
    assert not any(model.scheduler.prefixes.held)


def test_the_least_recently_used_prefix_is_given_up() -> None:
    prefixes = PrefixCache(3, 2)
    for slot, token in enumerate([7, 8, 9]):
        prefixes.hold(slot, [token] * 4, 4)
    prefixes.touch(0)
    assert prefixes.place_for(0, [1, 2]) == 1
    prefixes.move(0, 1)
    assert [list(held) for held in prefixes.held] == [[], [7] * 4, [9] * 4]
    assert prefixes.place_for(2, [1]) is None  # slot 1 was used later
    assert prefixes.longest([7, 7, 7, 7], 0) == (1, 2)  # the last token is always computed
    assert prefixes.longest([7, 7, 7, 7, 7], 0) == (1, 4)
