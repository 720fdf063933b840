"""Adapters beside a model compute what PEFT computes with set_adapter: alone, mixed in one batch, and in the server."""

import asyncio
import json
import shutil
import signal
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import openai
import peft
import pytest
import torch

from tests.inference.serve.test_real_model import ready_url
from tests.inference.test_generate import LLAMA, NEW_TOKENS, expected_tokens, load, random_prompts, run, save
from tests.support.forkserver import ForkServer
from tests.support.hf_reference import hf_model
from trainyard.core.errors import UserError
from trainyard.data.text.tokenizer import ByteTokenizer
from trainyard.devices.cpu import CpuDevice
from trainyard.inference import scheduler as scheduler_module
from trainyard.inference.load import InferenceModel
from trainyard.inference.requests import Request, SamplingOptions

OPTIONS: dict[str, dict[str, Any]] = {
    "a": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "b": {"r": 7, "lora_alpha": 9, "target_modules": "all-linear", "use_rslora": True},
}
GPT_OPTIONS: dict[str, dict[str, Any]] = {
    "a": {"r": 3, "target_modules": ["c_attn"], "fan_in_fan_out": True},
    "b": {"r": 5, "target_modules": ["mlp.c_proj", "c_fc"], "fan_in_fan_out": True},
}
NAMES = (None, "a", "b")


class Adapted(NamedTuple):
    """A model and its adapters, in folders and in PEFT."""

    base: Path
    paths: dict[str, str]
    model: Any

    def choose(self, name: str | None) -> Any:
        """PEFT's model with one adapter, or without any."""
        if name is None:
            return self.model.disable_adapter()
        self.model.set_adapter(name)
        return nullcontext()

    def tokens(self, name: str | None, prompt: list[int], **options: Any) -> list[int]:
        with self.choose(name):
            return expected_tokens(self.model, prompt, eos_token_id=None, **options)

    def logprobs(self, name: str | None, tokens: list[int], count: int) -> torch.Tensor:
        """The log-probabilities of the last `count` of `tokens`."""
        with self.choose(name), torch.no_grad():
            logits = self.model(input_ids=torch.tensor([tokens])).logits[0, -count - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens[-count:])[:, None])[:, 0]


def save_adapted(
    directory: Path,
    sizes: dict[str, Any] = LLAMA,
    variant: str = "llama-gqa",
    options: dict[str, dict[str, Any]] = OPTIONS,
) -> Adapted:
    """A model and random adapters, whose greedy texts differ."""
    base, _ = save(hf_model(variant, **sizes), directory / "base")
    torch.manual_seed(3)
    model: Any = type(hf_model(variant)).from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        configs = {name: peft.LoraConfig(task_type="CAUSAL_LM", **each) for name, each in options.items()}
        model = peft.get_peft_model(model, configs["a"], "a").eval()
        model.add_adapter("b", configs["b"])
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn_like(parameter) * 0.15
        model.save_pretrained(directory, selected_adapters=["a", "b"])
    return Adapted(base, {name: str(directory / name) for name in options}, model)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return save_adapted(tmp_path_factory.mktemp("adapted"))


def requests_of(prompts: list[list[int]]) -> list[Request]:
    """For the base and both adapters in turn."""
    options = SamplingOptions(max_new_tokens=NEW_TOKENS, num_logprobs=0)
    return [Request(number, prompt, options, number % 3) for number, prompt in enumerate(prompts)]


def check_texts(adapted: Adapted, loaded: InferenceModel, prompts: list[list[int]]) -> None:
    texts = []
    requests = requests_of(prompts)
    for number, events in run(loaded, requests).items():
        request, tokens = requests[number], [event.token for event in events]
        name = NAMES[request.adapter]
        assert tokens == adapted.tokens(name, request.prompt), name
        expected = adapted.logprobs(name, request.prompt + tokens, len(tokens))
        found = torch.tensor([event.logprob for event in events])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        texts.append(tuple(tokens))
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("variant", ["llama-gqa", pytest.param("qwen3", marks=pytest.mark.nightly), "gpt2"])
def test_mixed_batches_compute_what_peft_does(variant: str, tmp_path: Path) -> None:
    gpt: tuple[Any, ...] = ({"n_positions": 128, "vocab_size": 257}, variant, GPT_OPTIONS)
    adapted = save_adapted(tmp_path, *(gpt if variant == "gpt2" else (LLAMA, variant)))
    prompts = random_prompts(9, 9, 9, 5, 17, 40, 1, 2, 3)
    check_texts(adapted, load(adapted.base, max_batch=4, adapters=adapted.paths), prompts)
    one = random_prompts(6)[0]
    for name in ("a", "b"):
        alone = load(adapted.base, adapter=adapted.paths[name])
        events = run(alone, [Request(0, one, SamplingOptions(max_new_tokens=NEW_TOKENS))])[0]
        assert [event.token for event in events] == adapted.tokens(name, one)


def test_captured_and_compiled_steps_follow_the_adapter_of_a_slot(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is prepared once, and its rows belong to other adapters later."""
    monkeypatch.setattr(CpuDevice, "supports_graphs", True)
    loaded = load(adapted.base, max_batch=2, adapters=adapted.paths)
    loaded.scheduler.lookahead = 1
    check_texts(adapted, loaded, random_prompts(5, 5, 5, 6, 7, 8))


@pytest.mark.nightly
def test_compiled_steps_of_several_models_in_one_process(adapted: Adapted) -> None:
    """Each has graphs of its own: those of another model lack its adapters, or have some that it lacks."""
    prompts = random_prompts(5, 6, 7)
    for name in (None, "a"):
        loaded = load(adapted.base, max_batch=2, compiled=True, **({"adapter": adapted.paths[name]} if name else {}))
        for number, events in run(loaded, [Request(number, p) for number, p in enumerate(prompts)]).items():
            expected = adapted.tokens(name, prompts[number], max_new_tokens=len(events))
            assert [event.token for event in events] == expected, name
    check_texts(adapted, load(adapted.base, max_batch=2, compiled=True, adapters=adapted.paths), prompts)


def test_prefixes_are_not_shared_between_adapters(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "CPU_PREFILL_CHUNK", 8)
    loaded = load(adapted.base, max_batch=6, adapters=adapted.paths, shares_prefixes=True)
    (prompt,) = random_prompts(30)
    options = SamplingOptions(max_new_tokens=NEW_TOKENS)
    cached = []
    for number, adapter in enumerate([0, 1, 2, 1, 0, 2]):
        events = run(loaded, [Request(number, prompt, options, adapter)])[number]
        assert [event.token for event in events] == adapted.tokens(NAMES[adapter], prompt)
        cached.append(events[0].cached_tokens)
    assert cached == [0, 0, 0, 24, 24, 24]


def test_what_requests_cannot_choose_is_refused(adapted: Adapted, tmp_path: Path) -> None:
    for options, reason in [
        ({"use_dora": True}, r"x: has trained norms \(DoRA\).*nearest: convert --merge"),
        ({"modules_to_save": ["lm_head"]}, "x: trains head as it is"),
    ]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(
                hf_model("llama-gqa", **LLAMA), peft.LoraConfig(target_modules=["q_proj"], **options)
            )
            model.save_pretrained(tmp_path / "x")
        with pytest.raises(UserError, match=reason):
            load(adapted.base, adapters={"x": str(tmp_path / "x")})
        load(adapted.base, adapter=str(tmp_path / "x"))  # all requests use it
        shutil.rmtree(tmp_path / "x")
    other, _ = save(hf_model("llama-gqa", **LLAMA | {"hidden_size": 32}), tmp_path / "other")
    with pytest.raises(UserError, match=r"q_proj.lora_A.weight"):
        load(other, adapter=adapted.paths["a"])
    with pytest.raises(UserError, match="no adapter; expected"):
        load(adapted.base, adapters={"x": str(other)})


@pytest.fixture(params=[1, 2])
def url(adapted: Adapted, cli: ForkServer, request: pytest.FixtureRequest) -> Iterator[str]:
    options = ["--port", "0", "--device", "cpu", "--max-batch", "3", "--tp", str(request.param)]
    words = [word for name, path in adapted.paths.items() for word in ("--adapter", f"{name}={path}")]
    process = cli.start(["serve", adapted.base, *options, *words])
    yield ready_url(process, "base, a, b")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_openai_clients_choose_adapters_by_model(adapted: Adapted, url: str) -> None:
    names = {"base": None, "a": "a", "b": "b"}

    async def complete() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            answers = [
                client.completions.create(model=name, prompt="Once", max_tokens=12, temperature=0) for name in names
            ]
            found = await asyncio.gather(*answers)
            assert [answer.model for answer in found] == list(names)
            return [answer.choices[0].text for answer in found]

    prompt = list(b"Once")
    expected = [adapted.tokens(name, prompt, max_new_tokens=12) for name in names.values()]
    expected = [tokens[: tokens.index(256)] if 256 in tokens else tokens for tokens in expected]
    assert asyncio.run(complete()) == [ByteTokenizer().decode(tokens) for tokens in expected]
    client = openai.OpenAI(base_url=url, api_key="none")
    assert [model.id for model in client.models.list()] == list(names)
    assert client.models.retrieve("b").id == "b"
    with pytest.raises(openai.NotFoundError, match=r"model 'bas': this server has 'base', 'a', 'b'; nearest: base"):
        client.completions.create(model="bas", prompt="x")


def test_commands_take_an_adapter(adapted: Adapted, cli: ForkServer, tmp_path: Path) -> None:
    arguments = ["generate", str(adapted.base), "-p", "Once", "--json", "-n", "9", "--ignore-end", "--device", "cpu"]
    for name in NAMES:
        done = cli.run([*arguments, *(["--adapter", adapted.paths[name]] if name else [])])
        assert json.loads(done.stdout)["tokens"] == adapted.tokens(name, list(b"Once"), max_new_tokens=9), done.stderr
    text = "Once upon a time there was a model that had two adapters. " * 3
    (tmp_path / "a.txt").write_text(text)
    words = ["eval", str(adapted.base), str(tmp_path / "a.txt"), "data.seq_len=32", "--json", "device.name=cpu"]
    losses = []
    for name in NAMES:
        done = cli.run([*words, *(["--adapter", adapted.paths[name]] if name else [])])
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout)["results"][0]["loss"])
    assert len(set(losses)) == 3
    for adapter, reason in (("x", "nearest: --adapter x=x"), ("base=x", "base is another model already")):
        done = cli.run(["serve", str(adapted.base), "--adapter", adapter])
        assert done.returncode == 2
        assert reason in done.stderr
