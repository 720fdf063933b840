"""The engine with the decode kernels of GPUs, in Triton's interpreter, generates what transformers does."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.inference.test_adapters import NAMES, save_adapted
from tests.inference.test_generate import expected_tokens, load, run, run_prompts
from tests.support.hf_reference import LLAMA_LIKE, hf_model, known_keys
from trainyard.devices.cpu import CpuDevice
from trainyard.inference.requests import Request, SamplingOptions
from trainyard.kernels.triton.decode import decode_attention as attention
from trainyard.kernels.triton.decode import skinny_linear as products
from trainyard.kernels.triton.decode.decode_attention import DecodeAttentionConfig
from trainyard.kernels.triton.decode.ops import DecodeKernels
from trainyard.kernels.triton.decode.skinny_linear import LinearConfig

TINY: dict[str, Any] = {"vocab_size": 50, "initializer_range": 0.3}
LLAMA = {
    **TINY, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
NEXT = {**LLAMA, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 0}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    **{name: partial(hf_model, name, **known_keys(name, LLAMA), bos_token_id=0, eos_token_id=0) for name in LLAMA_LIKE},
    "deepseek_v3": partial(
        hf_model, "deepseek_v3", **LLAMA | {"num_key_value_heads": 4, "num_hidden_layers": 2}, bos_token_id=0,
        eos_token_id=0,
    ),
    "qwen3_next": partial(hf_model, "qwen3_next", **NEXT, mlp_only_layers=[0, 1]),
    "gpt": lambda: GPT2LMHeadModel(  # its files store transposed matrices
        GPT2Config(**TINY, n_embd=32, n_layer=1, n_head=2, n_positions=32, eos_token_id=49, bos_token_id=49)
    ),
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "llama")) for name in MODELS]
)
def test_tokens_equal_those_of_transformers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "decode_kernels", lambda self, fused: DecodeKernels())
    # In the interpreter, a program costs much more than an element: use few programs.
    monkeypatch.setattr(products, "linear_config", lambda *_: LinearConfig(32, 64, 4, 3))
    monkeypatch.setattr(attention, "attention_config", lambda *_: DecodeAttentionConfig(2, 16, 4, 1))
    model = MODELS[family]().eval()
    model.save_pretrained(tmp_path)
    prompts = [torch.randint(1, 48, (length,)).tolist() for length in (1, 7)]
    expected = [expected_tokens(model, prompt, max_new_tokens=3, eos_token_id=None) for prompt in prompts]
    for batch in (1, 2):  # one row and several have different kernels
        assert run_prompts(load(tmp_path, max_batch=batch, max_seq_len=16), prompts, max_new_tokens=3) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_adapters_of_rows_and_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pending matmul must not forget an update of its result, which gate and up would compute again with SwiGLU."""
    monkeypatch.setattr(CpuDevice, "decode_kernels", lambda self, fused: DecodeKernels())
    monkeypatch.setattr(products, "linear_config", lambda *_: LinearConfig(32, 64, 4, 3))
    monkeypatch.setattr(attention, "attention_config", lambda *_: DecodeAttentionConfig(2, 16, 4, 1))
    adapted = save_adapted(tmp_path, {**LLAMA, "eos_token_id": 49, "bos_token_id": 49})
    prompts = [torch.randint(1, 48, (length,)).tolist() for length in (3, 1, 7)]
    options = SamplingOptions(max_new_tokens=3)
    requests = [Request(number, prompt, options, number) for number, prompt in enumerate(prompts)]
    expected = [adapted.tokens(name, prompt, max_new_tokens=3) for name, prompt in zip(NAMES, prompts, strict=True)]
    events = run(load(tmp_path / "base", max_batch=2, max_seq_len=16, adapters=adapted.paths), requests)
    assert [[event.token for event in events[number]] for number in range(3)] == expected
    alone = load(tmp_path / "base", max_batch=2, max_seq_len=16, adapter=adapted.paths["b"])
    found = run_prompts(alone, prompts, max_new_tokens=3)
    assert found == [adapted.tokens("b", prompt, max_new_tokens=3) for prompt in prompts]
