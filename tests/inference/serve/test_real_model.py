"""A checkpoint behind the server writes what transformers writes with it."""

import asyncio
import re
import signal
import time
from pathlib import Path

import httpx
import openai
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.forkserver import ForkedProcess, ForkServer
from trainyard.data.text.tokenizer import ByteTokenizer, TokenizerSpec, hf_tokenizer_files

NEW_TOKENS = 24
PROMPTS = ["Once upon a time", "x", "né🙂 " * 8, "The cat"]


def save_llama(directory: Path) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=257,
        eos_token_id=256,
        bos_token_id=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    for name, content in hf_tokenizer_files(TokenizerSpec("bytes")).items():
        (directory / name).write_bytes(content)
    return model


def reference_tokens(model: LlamaForCausalLM, prompt: str) -> list[int]:
    tokens = torch.tensor([list(prompt.encode())])
    output = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    found: list[int] = output[0, tokens.shape[1] :].tolist()
    return found


def ready_url(process: ForkedProcess, name: str) -> str:
    deadline = time.monotonic() + 120
    text = ""
    assert process.stdout
    assert process.stderr
    while time.monotonic() < deadline:
        text += process.stdout.read()
        if found := re.search(rf"serving {name} at (\S+)\n", text):
            return found[1]
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    raise AssertionError(text)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_completions_are_those_of_transformers(cli: ForkServer, tmp_path: Path, tp: int) -> None:
    model = save_llama(tmp_path / "tiny")
    options = ["--port", "0", "--device", "cpu", "--max-batch", "3", "--tp", str(tp)]
    process = cli.start(["serve", tmp_path / "tiny", *options])
    url = ready_url(process, "tiny")

    async def complete() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            answers = [
                client.completions.create(model="tiny", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, logprobs=3)
                for prompt in PROMPTS
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    expected = [reference_tokens(model, prompt) for prompt in PROMPTS]
    assert asyncio.run(complete()) == [ByteTokenizer().decode(tokens) for tokens in expected]
    client = openai.OpenAI(base_url=url, api_key="none")
    found = client.completions.create(model="tiny", prompt="x", max_tokens=1, temperature=0, logprobs=3).choices[0]
    with torch.no_grad():
        logprobs = model(torch.tensor([[ord("x")]])).logits[0, -1].log_softmax(-1)
    assert found.logprobs is not None
    assert found.logprobs.token_logprobs is not None
    assert abs(found.logprobs.token_logprobs[0] - float(logprobs.max())) < 1e-4
    chats = [
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=9, seed=seed
        ).choices[0]
        for seed in (1, 1, 2)
    ]
    assert chats[0].message.content == chats[1].message.content != chats[2].message.content
    long = "Once upon a time there was a model. " * 4
    first, second, other = (
        client.completions.create(model="tiny", prompt=prompt, max_tokens=9, temperature=0, n=2)
        for prompt in (long, long, long[:-1] + "x")
    )
    assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]
    cached = [found.usage and found.usage.prompt_tokens_details for found in (first, second, other)]
    assert [found and found.cached_tokens for found in cached] == [0, 128, 128]
    assert "trainyard_prompt_tokens_cached_total 640\n" in httpx.get(url.removesuffix("/v1") + "/metrics").text
    animal = {"type": "object", "properties": {"legs": {"enum": [0, 2, 4]}}, "required": ["legs"]}
    animal |= {"additionalProperties": False}
    answers = [
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            seed=seed,
            frequency_penalty=0.1,
            response_format={"type": "json_schema", "json_schema": {"name": "animal", "schema": animal}},
        ).choices[0]
        for seed in range(4)
    ]
    assert all(answer.finish_reason == "stop" for answer in answers)
    assert {answer.message.content for answer in answers} <= {f'{{"legs":{legs}}}' for legs in (0, 2, 4)}
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert process.stderr
    assert process.stderr.read() == ""
