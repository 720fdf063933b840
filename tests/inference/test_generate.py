"""Generated tokens equal those of transformers, whatever the batch, the format of the checkpoint and the layout."""

import json
import re
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.support.forkserver import ForkServer
from tests.support.hf_folders import copy_without_end_token, edit_json
from tests.support.hf_reference import LLAMA_LIKE, LONGROPE, MOE_VARIANTS, hf_model, known_keys
from trainyard.core.errors import UserError
from trainyard.data.text.tokenizer import TokenizerSpec, hf_tokenizer_files
from trainyard.devices.cpu import CpuDevice
from trainyard.formats.convert import ConversionTarget, convert_checkpoint, parse_layout
from trainyard.formats.registry import open_weights
from trainyard.inference import engine as engine_module
from trainyard.inference import scheduler as scheduler_module
from trainyard.inference.build_engine import cache_bytes
from trainyard.inference.cached_attention import CachedAttention
from trainyard.inference.engine import GraphedStep
from trainyard.inference.load import InferenceModel, InferenceOptions, load_for_inference
from trainyard.inference.requests import Request, SamplingOptions, TokenEvent

VOCAB, END = 257, 256
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "initializer_range": 0.2, "eos_token_id": END, "bos_token_id": END}
LLAMA: dict[str, Any] = {
    **SMALL,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA | {"tie_word_embeddings": True})),
    "llama one kv head": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA | {"num_key_value_heads": 1})),
    "deepseek": lambda: LlamaForCausalLM(
        LlamaConfig(**LLAMA | {"num_key_value_heads": 8}, rope_scaling={"rope_type": "linear", "factor": 4.0})
    ),
    **{
        f"llama {rope['rope_type']}": partial(
            lambda rope, positions: LlamaForCausalLM(
                LlamaConfig(**LLAMA | {"max_position_embeddings": positions}, rope_scaling=rope)
            ),
            rope,
            positions,
        )
        for rope, positions in (
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
            ({"rope_type": "dynamic", "factor": 4.0}, 32),
            ({**LONGROPE, "short_factor": [1.0, 1.5, 1.5, 2.0], "long_factor": [1.0, 3.0, 4.0, 6.0]}, 128),
        )
    },
    **{
        name: partial(hf_model, name, **known_keys(name, LLAMA))
        for name in (*LLAMA_LIKE, "qwen3_next", *MOE_VARIANTS)
        if "deepseek" not in name
    },
    **{
        name: partial(hf_model, name, **LLAMA | {"num_key_value_heads": 8, "initializer_range": 0.1})
        for name in MOE_VARIANTS
        if "deepseek" in name
    },
    "gpt": lambda: GPT2LMHeadModel(GPT2Config(**SMALL, n_embd=64, n_layer=2, n_head=4, n_positions=128)),
}
ADDED = ("single_word", "lstrip", "rstrip", "normalized")
"""Properties of a token in tokenizer.json."""
LENGTHS = (1, 5, 17, 40, 90, 3, 64)
NEW_TOKENS = 20


VARIANTS_OF_FAMILIES = {*LLAMA_LIKE, "qwen3_next", *MOE_VARIANTS}
"""Which tests/families/test_exports.py generates with, too."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.nightly] * (name in VARIANTS_OF_FAMILIES)) for name in MODELS],
)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(1)
    return save(MODELS[request.param](), tmp_path_factory.mktemp("model"))


def save(model: Any, directory: Path) -> tuple[Path, Any]:
    model.eval().save_pretrained(directory)
    for name, content in hf_tokenizer_files(TokenizerSpec("bytes")).items():
        (directory / name).write_bytes(content)
    return directory, model


def random_prompts(*lengths: int) -> list[list[int]]:
    return [torch.randint(0, END, (length,)).tolist() for length in lengths]


def expected_tokens(model: Any, prompt: list[int], **options: Any) -> list[int]:
    tokens = torch.tensor([prompt])
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0} | options
    output = model.generate(tokens, attention_mask=torch.ones_like(tokens), **arguments)
    return list(output[0, len(prompt) :].tolist())


def load(source: Path | str, **options: Any) -> InferenceModel:
    return load_for_inference(str(source), InferenceOptions(**{"device": "cpu", "max_batch": 3} | options))


def run(model: InferenceModel, requests: list[Request]) -> dict[int, list[TokenEvent]]:
    for request in requests:
        model.scheduler.add(request)
    events: dict[int, list[TokenEvent]] = {request.request_id: [] for request in requests}
    while model.scheduler.has_work:
        for event in model.scheduler.step():
            events[event.request_id].append(event)
    return events


def run_prompts(model: InferenceModel, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    sampling = SamplingOptions(**{"max_new_tokens": NEW_TOKENS, "end_ids": frozenset([END])} | options)
    events = run(model, [Request(index, prompt, sampling) for index, prompt in enumerate(prompts)])
    return [[event.token for event in events[index]] for index in range(len(prompts))]


def test_greedy_tokens_equal_those_of_transformers(reference: tuple[Path, Any]) -> None:
    """Prompts of different lengths share a batch that is smaller than their number."""
    directory, model = reference
    prompts = random_prompts(*LENGTHS)
    assert run_prompts(load(directory), prompts) == [expected_tokens(model, prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(2)
    return save(MODELS["llama"](), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model whose caches are rings of 5 tokens."""
    torch.manual_seed(2)
    sizes = {"sliding_window": 5, "num_key_value_heads": 2}
    return save(hf_model("mistral", **LLAMA | sizes), tmp_path_factory.mktemp("windows"))


@pytest.mark.parametrize("chunk", [16, 1024])
@pytest.mark.parametrize("window", [5, 16, 21])
def test_caches_of_windows_are_rings(tmp_path: Path, window: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows shorter and longer than the units of prompts, slots that get one prompt after the other."""
    monkeypatch.setattr(scheduler_module, "PREFILL_CHUNK", chunk)
    torch.manual_seed(4)
    sizes = {"sliding_window": window, "max_position_embeddings": 128, "num_key_value_heads": 2}
    directory, model = save(hf_model("mistral", **LLAMA | sizes), tmp_path)
    loaded = load(directory)
    caches = [module for module in loaded.module.modules() if isinstance(module, CachedAttention)]
    assert {cache.k_cache.shape[2] for cache in caches} == {window}
    allocated = 2 * sum(cache.k_cache.nbytes + cache.v_cache.nbytes for cache in caches)  # with the copy of rings
    assert cache_bytes(loaded.model_config, 1, 3, loaded.max_seq_len, 4, False) == allocated
    prompts = random_prompts(3, 70, 16, 17, 33, 21, 90)
    assert run_prompts(loaded, prompts) == [expected_tokens(model, prompt) for prompt in prompts]


def test_long_prompts_in_chunks(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests are decoded between the chunks of a prompt, and must not disturb its cache."""
    monkeypatch.setattr(scheduler_module, "PREFILL_CHUNK", 16)
    prompts = random_prompts(3, 70, 16, 17, 33)
    assert run_prompts(load(llama[0]), prompts) == [expected_tokens(llama[1], prompt) for prompt in prompts]


def test_batch_invariant_tokens_equal_those_of_transformers(llama: tuple[Path, Any]) -> None:
    prompts = random_prompts(*LENGTHS)
    expected = [expected_tokens(llama[1], prompt) for prompt in prompts]
    assert run_prompts(load(llama[0], batch_invariant=True), prompts) == expected


@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_captured_steps_give_the_same_tokens(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, num_logprobs: int | None
) -> None:
    """The path of devices with graphs: here, a captured step is the step itself."""
    options = SamplingOptions(max_new_tokens=NEW_TOKENS, num_logprobs=num_logprobs)
    requests = [Request(index, prompt, options) for index, prompt in enumerate(random_prompts(*LENGTHS))]
    expected = run(load(llama[0]), requests)
    monkeypatch.setattr(CpuDevice, "supports_graphs", True)
    model = load(llama[0])
    model.scheduler.lookahead = 1  # read a step while the next one runs
    for index, events in run(model, requests).items():
        assert [event.token for event in events] == [event.token for event in expected[index]]
        assert [event.logprob for event in events] == pytest.approx([event.logprob for event in expected[index]])


def test_results_of_a_captured_step_survive_later_steps() -> None:
    counter = torch.zeros(2, dtype=torch.int64)
    step = GraphedStep(CpuDevice(), lambda: [counter.add_(1)], [counter])
    assert [read().tokens for read in [step() for _ in range(5)]] == [[i, i] for i in range(1, 6)]


def test_sequences_end_at_the_longest_length_and_at_end_tokens(llama: tuple[Path, Any]) -> None:
    directory, model = llama
    (prompt,) = random_prompts(30)
    tokens = expected_tokens(model, prompt, max_new_tokens=10)
    loaded = load(directory, max_seq_len=35)
    events = run(loaded, [Request(0, prompt, SamplingOptions(max_new_tokens=50))])[0]
    assert [event.token for event in events] == tokens[:5]
    assert [event.finish_reason for event in events] == [None] * 4 + ["length"]
    ends = frozenset([tokens[3]])
    events = run(loaded, [Request(0, prompt, SamplingOptions(max_new_tokens=50, end_ids=ends))])[0]
    assert [event.token for event in events] == tokens[: tokens.index(tokens[3]) + 1]
    assert events[-1].finish_reason == "stop"
    ends = frozenset([tokens[0]])
    (event,) = run(loaded, [Request(0, prompt, SamplingOptions(max_new_tokens=50, end_ids=ends))])[0]
    assert (event.token, event.finish_reason) == (tokens[0], "stop")


@pytest.mark.parametrize("cancelled", [False, True])
def test_slots_that_are_free_do_not_grow(llama: tuple[Path, Any], cancelled: bool) -> None:
    """Attention of a step reads as many positions as a slot has, whoever it belongs to."""
    loaded = load(llama[0])
    short, long = random_prompts(9, 12)
    loaded.scheduler.add(Request(1, short, SamplingOptions(max_new_tokens=40 if cancelled else 3)))
    loaded.scheduler.add(Request(2, long, SamplingOptions(max_new_tokens=30)))
    for _ in range(3):
        loaded.scheduler.step()
    loaded.scheduler.cancel(1)
    for _ in range(5):
        loaded.scheduler.step()
    lengths = loaded.scheduler.engine.lengths.tolist()
    assert lengths[0] == 0
    assert lengths[1] > len(long) + 5


def test_end_tokens_of_the_model_come_before_those_of_its_tokenizer(
    llama: tuple[Path, Any], cli: ForkServer, tmp_path: Path
) -> None:
    """generation_config.json, config.json, then the tokenizer; without any, a text ends at its limit."""
    copy_without_end_token(llama[0], copy := tmp_path / "copy")
    tokens = expected_tokens(llama[1], list(b"The quick"), max_new_tokens=8, eos_token_id=None)
    assert len(tokens) == 8

    def generate() -> list[int]:
        done = cli.run(["generate", str(copy), "-p", "The quick", "-n", "8", "--json", "--device", "cpu"])
        assert done.returncode == 0, done.stderr
        found: list[int] = json.loads(done.stdout)["tokens"]
        return found

    edit_json(copy / "config.json", eos_token_id=tokens[4])
    assert generate() == tokens[: tokens.index(tokens[4]) + 1]
    edit_json(copy / "generation_config.json", eos_token_id=[tokens[2]])
    assert generate() == tokens[: tokens.index(tokens[2]) + 1]
    (copy / "generation_config.json").unlink()
    edit_json(copy / "config.json", eos_token_id=None)
    assert generate() == tokens
    assert load(copy).end_ids == frozenset()
    tokenizer = {"added_tokens": [{"id": END, "content": "</s>", "special": True, **dict.fromkeys(ADDED, False)}]}
    edit_json(copy / "tokenizer.json", **tokenizer)
    assert load(copy).end_ids == {END}


def test_other_threads_run_while_a_long_prompt_is_encoded(llama: tuple[Path, Any]) -> None:
    """A server answers other requests meanwhile."""
    loaded, gaps, done = load(llama[0]), [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not done.wait(0.001):
            gaps.append((now := time.perf_counter()) - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    assert len(loaded.encode_prompt("The quick brown fox. " * 40_000)) == 21 * 40_000
    elapsed = time.perf_counter() - begin
    done.set()
    thread.join()
    assert max(gaps) < elapsed / 2


def test_cancelled_requests_leave_their_slot_to_others(llama: tuple[Path, Any]) -> None:
    directory, model = llama
    loaded = load(directory, max_batch=1)
    first, second = random_prompts(9, 12)
    loaded.scheduler.add(Request(1, first, SamplingOptions(max_new_tokens=60)))
    loaded.scheduler.add(Request(2, second, SamplingOptions(max_new_tokens=NEW_TOKENS)))
    for _ in range(3):
        assert {event.request_id for event in loaded.scheduler.step()} <= {1}
    loaded.scheduler.cancel(1)
    tokens = []
    while loaded.scheduler.has_work:
        events = loaded.scheduler.step()
        assert all(event.request_id == 2 for event in events)
        tokens += [event.token for event in events]
    assert tokens == expected_tokens(model, second)[: len(tokens)]
    assert len(tokens) == NEW_TOKENS


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_logprobs_equal_those_of_transformers(llama: tuple[Path, Any], temperature: float) -> None:
    """They are those of the model, before temperature."""
    directory, model = llama
    (prompt,) = random_prompts(11)
    options = SamplingOptions(temperature, max_new_tokens=6, num_logprobs=3)
    events = run(load(directory), [Request(0, prompt, options)])[0]
    tokens = [event.token for event in events]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    for row, event in zip(expected, events, strict=True):
        assert event.logprob == pytest.approx(float(row[event.token]), abs=1e-4)
        top = row.topk(3)
        assert [token for token, _ in event.top_logprobs] == top.indices.tolist()
        assert [value for _, value in event.top_logprobs] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_samples_do_not_depend_on_the_batch(llama: tuple[Path, Any]) -> None:
    prompts = random_prompts(*LENGTHS)
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 7}
    together = run_prompts(load(llama[0], max_batch=4), prompts, **options)
    alone = [run_prompts(load(llama[0], max_batch=1), [prompt], **options)[0] for prompt in prompts[:3]]
    assert together[:3] == alone
    assert run_prompts(load(llama[0]), prompts[:1], **options | {"seed": 8}) != alone[:1]


def penalized_tokens(model: Any, prompt: list[int], presence: float, frequency: float) -> list[int]:
    """Greedy tokens with OpenAI's formula for both penalties, on logits of transformers."""
    tokens: list[int] = []
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
        for token, count in Counter(tokens).items():
            logits[token] -= presence + frequency * count
        tokens.append(int(logits.argmax()))
        if tokens[-1] == END:
            break
    return tokens


@pytest.mark.parametrize("has_graphs", [False, True])
def test_penalties_are_those_of_transformers_and_openai(
    llama: tuple[Path, Any], has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one batch, with a request that has none and keeps its tokens."""
    monkeypatch.setattr(CpuDevice, "supports_graphs", has_graphs)
    loaded, model = load(llama[0], max_batch=4), llama[1]
    loaded.scheduler.lookahead = int(has_graphs)
    prompts = random_prompts(7, 30, 12, 9, 5)
    penalties: list[dict[str, float]] = [
        {},
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 2.0, "presence_penalty": -0.5},
        {"repetition_penalty": 0.6},
    ]
    expected = [
        expected_tokens(model, prompts[0]),
        expected_tokens(model, prompts[1], repetition_penalty=1.7),
        penalized_tokens(model, prompts[2], 1.5, 0.0),
        penalized_tokens(model, prompts[3], -0.5, 2.0),
        expected_tokens(model, prompts[4], repetition_penalty=0.6),
    ]
    assert all(
        tokens != expected_tokens(model, prompt) for tokens, prompt in zip(expected[1:], prompts[1:], strict=True)
    )
    for _ in range(2):  # slots are used again
        options = [SamplingOptions(**each, max_new_tokens=NEW_TOKENS, end_ids=frozenset([END])) for each in penalties]
        requests = [Request(index, prompt, options[index]) for index, prompt in enumerate(prompts)]
        events = run(loaded, requests)
        assert [[event.token for event in events[index]] for index in range(5)] == expected


def test_steps_without_penalties_have_no_state_of_them(llama: tuple[Path, Any]) -> None:
    loaded = load(llama[0])
    run_prompts(loaded, random_prompts(5), temperature=1.0, num_logprobs=1)
    assert loaded.scheduler.engine.sampler.penalties is None


@pytest.mark.parametrize(("target", "layout"), [("native", "tp=2,pp=2"), ("nxd", "tp=2,kv_multiplier=1"), ("dcp", "")])
def test_any_format_generates_without_conversion(
    llama: tuple[Path, Any], tmp_path: Path, target: Any, layout: str
) -> None:
    directory, model = llama
    destination = tmp_path / target
    conversion = ConversionTarget(target, parse_layout(target, layout))
    convert_checkpoint(open_weights(directory), directory, destination, conversion, lambda size: None)
    if target == "nxd":
        (destination / "config.json").write_bytes((directory / "config.json").read_bytes())
    prompts = random_prompts(4, 9)
    assert run_prompts(load(destination), prompts) == [expected_tokens(model, prompt) for prompt in prompts]


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_fp8_weights_give_the_tokens_of_rounded_weights(family: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    directory, model = save(MODELS[family](), tmp_path)
    changed = 0
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and re.search("proj|attn|mlp", name):
            matrix = weight.data.T if family == "gpt" else weight.data  # GPT-2 stores [inputs, outputs]
            exponent = torch.floor(torch.log2(448 / matrix.abs().amax(1, keepdim=True)))
            rounded = (matrix * 2**exponent).to(torch.float8_e4m3fn).float() / 2**exponent
            changed += int((matrix != rounded).sum())
            matrix.copy_(rounded)
    assert changed
    prompts = random_prompts(*LENGTHS)
    expected = [expected_tokens(model, prompt) for prompt in prompts]
    assert run_prompts(load(directory), prompts) != expected
    assert run_prompts(load(directory, fp8_weights=True), prompts) == expected
    with pytest.raises(UserError, match="not with --compile"):
        load(directory, fp8_weights=True, compiled=True)


@pytest.mark.nightly
def test_compiled_steps_give_the_same_tokens(
    llama: tuple[Path, Any], windows: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when sequences outgrow the positions for which a step was compiled."""
    monkeypatch.setattr(engine_module, "VISIBLE_STEP", 8)
    prompts = random_prompts(4, 9)
    for directory, new_tokens in ((llama[0], NEW_TOKENS), (windows[0], 4)):
        plain = run_prompts(load(directory), prompts, max_new_tokens=new_tokens)
        assert run_prompts(load(directory, compiled=True), prompts, max_new_tokens=new_tokens) == plain


@pytest.mark.parametrize(
    ("model", "tp", "options"),
    [
        ("llama", 2, []),
        pytest.param("windows", 2, [], marks=pytest.mark.nightly),
        pytest.param("llama", 4, [], marks=pytest.mark.nightly),
        pytest.param("llama", 2, ["--fp8-weights"], marks=pytest.mark.nightly),
    ],
)
def test_tensor_parallel_ranks_generate_the_same_text(
    model: str, cli: ForkServer, tp: int, options: list[str], request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(model)[0]
    arguments = ["generate", str(directory), "--prompt", "The quick", "--prompt", "x", "--json", "-n", "12", *options]
    one, several = (cli.run([*arguments, "--device", "cpu", "--tp", str(ranks)]) for ranks in (1, tp))
    assert (one.returncode, several.returncode) == (0, 0), several.stderr
    assert several.stdout == one.stdout
    lines = [json.loads(line) for line in one.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["The quick", "x"]


def test_prompts_with_mistakes_are_refused(llama: tuple[Path, Any]) -> None:
    loaded = load(llama[0], max_seq_len=16)
    for prompt, options, message in [
        ([], {}, "is empty"),
        ([1] * 16, {}, "the limit is 16 tokens"),
        ([VOCAB], {}, "not in the vocabulary"),
        ([-1], {}, "not in the vocabulary"),
        ([1], {"num_logprobs": 21}, "limit is 20"),
        ([1], {"max_new_tokens": 0}, "at least 1"),
    ]:
        with pytest.raises(UserError, match=message):
            loaded.scheduler.add(Request(0, prompt, SamplingOptions(**options)))
    assert not loaded.scheduler.has_work


def test_command_prints_text_and_stops(llama: tuple[Path, Any], cli: ForkServer, tmp_path: Path) -> None:
    directory = str(llama[0])
    text = cli.run(["generate", directory, "-p", "The quick", "-n", "8", "--device", "cpu"])
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("The quick")
    tokens = expected_tokens(llama[1], list(b"The quick"), max_new_tokens=8)
    complete = bytes(token for token in tokens if token < 256).decode(errors="replace")
    assert text.stdout == f"The quick{complete}\n"
    assert "8 tokens in" in text.stderr
    batch = tmp_path / "prompts.jsonl"
    batch.write_text('{"prompt": "The quick"}\nplain text\n{"tokens": [1, 2]}\n')
    done = cli.run(["generate", directory, "--batch", str(batch), "-n", "8", "--json", "--device", "cpu"])
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert lines[0]["tokens"] == tokens
    stop = complete[2:4]
    stopped = cli.run(["generate", directory, "-p", "The quick", "--stop", stop, "--json", "--device", "cpu"])
    (line,) = (json.loads(line) for line in stopped.stdout.splitlines())
    assert (line["text"], line["finish_reason"]) == (complete[: complete.index(stop)], "stop")
    chat = cli.run(["generate", directory, "--chat", "-p", "hello", "-n", "4", "--device", "cpu"])
    assert chat.returncode == 0, chat.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL"], "nothing to continue"),
        (["MODEL", "-p", "a", "--batch", "x"], "not together"),
        (["MODEL", "--batch", "no-such-file"], "cannot be read"),
        (["MODEL", "--batch", 'BATCH:{"x": 1}'], "needs prompt"),
        (["MODEL", "--batch", 'BATCH:{"tokens": ["a"]}'], "list of numbers"),
        (["MODEL", "--batch", 'BATCH:{"messages": "hi"}'], "list of objects"),
        (["MODEL", "--batch", "BATCH:{"], "not JSON"),
        (["MODEL", "--batch", "BATCH:"], "has no prompts"),
        (["no-such-directory", "-p", "a"], "no such file"),
        (["MODEL", "-p", ""], "empty"),
        (["MODEL", "-p", "a", "--max-seq-len", "1000"], "limit is 128"),
        (["MODEL", "-p", "a", "--tp", "3"], "does not divide"),
        (["MODEL", "-p", "a", "--temperature", "-1"], "temperature"),
        (["MODEL", "-p", "a", "--device", "tpu"], "unknown device"),
    ],
)
def test_mistakes_are_one_line(
    llama: tuple[Path, Any], cli: ForkServer, tmp_path: Path, arguments: list[str], message: str
) -> None:
    words = [str(llama[0]) if word == "MODEL" else word for word in arguments]
    if words[-1].startswith("BATCH:"):
        (tmp_path / "prompts.jsonl").write_text(words[-1].removeprefix("BATCH:"))
        words[-1] = str(tmp_path / "prompts.jsonl")
    done = cli.run(["generate", *words])
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_masks_are_filled_as_by_transformers(tmp_path: Path, cli: ForkServer) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    model = BertForPreTraining(config).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    done = cli.run(["fill-mask", str(tmp_path), "a b [MASK] d [MASK]", "--json", "--device", "cpu", "--top", "3"])
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)
    tokens = torch.tensor([[2, 5, 6, 4, 8, 4, 3]])
    with torch.no_grad():
        probabilities = model(tokens).prediction_logits[0].softmax(-1)
    for position, mask in zip((3, 5), entry["masks"], strict=True):
        top = probabilities[position].topk(3)
        assert [candidate["token"] for candidate in mask] == top.indices.tolist()
        assert [candidate["probability"] for candidate in mask] == pytest.approx(top.values.tolist(), abs=1e-5)
        assert [candidate["text"] for candidate in mask] == [words[token] for token in top.indices.tolist()]
    refused = cli.run(["fill-mask", str(tmp_path), "no mask", "--device", "cpu"])
    assert refused.returncode == 2
    assert "has no [MASK]" in refused.stderr
