"""Latent attention: its cache, its work, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.inference.test_generate import load, run_prompts
from tests.support import configs
from tests.support.forkserver import ForkServer
from tests.support.hf_reference import DEEPSEEK_V3, LLAMA, hf_model
from trainyard import models
from trainyard.core.errors import UserError
from trainyard.data.text.tokenizer import TokenizerSpec, hf_tokenizer_files
from trainyard.families.flops import flops_per_sample
from trainyard.families.hf_config import from_hf
from trainyard.inference.build_engine import cache_bytes
from trainyard.inference.cached_latent_attention import CachedLatentAttention, weight_of
from trainyard.models.init import initial_values
from trainyard.models.layers import LatentAttention

V3 = {**LLAMA, **DEEPSEEK_V3, "model_type": "deepseek_v3"}


def test_flops_match_torchs_counter() -> None:
    """Of all projections, of scores and of narrower values; of blocks that predict further tokens, and their heads."""
    section = configs.tiny_config({**configs.DEEPSEEK, "dense_layers": "0-1"}).model
    model, batch = configs.tiny_model(section), configs.tiny_batch("llama")
    model.cp.decomposes_attention = True  # one opaque operator otherwise
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = model.eval()(batch)
        for each in (output, *(further for further, _ in output.further)):
            each.logits()
    flops = flops_per_sample(section, models.blueprint_of(section), 24, 0)
    assert counter.get_total_flops() == pytest.approx(flops.full_attention, rel=1e-6)  # 3 samples, forward only
    assert flops.causal_attention < flops.full_attention


def test_a_cache_has_the_latents_only(tmp_path: Path) -> None:
    """As large as the count of plan and serve says; a step neither makes keys nor reads more than the latents."""
    hf_model("deepseek_v3", num_nextn_predict_layers=1).save_pretrained(tmp_path)
    model = load(tmp_path, max_batch=2, max_seq_len=32)
    section: Any = model.model_config
    caches = [module for module in model.module.modules() if isinstance(module, CachedLatentAttention)]
    assert len(caches) == section.layers  # not for blocks that predict further tokens
    numbers = section.kv_lora_rank + section.qk_rope_head_dim
    assert all(tuple(cache.latents.shape) == (2, 1, 33, numbers) for cache in caches)
    nbytes = sum(tensor.nbytes for cache in caches for tensor in cache.caches)
    assert nbytes == cache_bytes(section, 1, 2, 32, 4, False) == section.layers * 2 * 33 * numbers * 4
    made = 0

    def count(*arguments: Any) -> Any:
        nonlocal made
        made += model.scheduler.engine.state.decoding
        return keys_and_values(*arguments)

    keys_and_values = LatentAttention.keys_and_values
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatentAttention, "keys_and_values", count)
        run_prompts(model, [[1, 2, 3]], max_new_tokens=5)
    assert made == 0


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[], ["--fp8-weights"]])
def test_tensor_parallel_ranks_generate_the_same_text(tmp_path: Path, cli: ForkServer, options: list[str]) -> None:
    hf_model("deepseek_v3-yarn", vocab_size=257, initializer_range=0.3).save_pretrained(tmp_path)
    for name, content in hf_tokenizer_files(TokenizerSpec("bytes")).items():
        (tmp_path / name).write_bytes(content)
    arguments = ["generate", str(tmp_path), "--prompt", "The quick", "--prompt", "x", "--json", "-n", "8", *options]
    one, two = (cli.run([*arguments, "--device", "cpu", "--tp", str(ranks)]) for ranks in (1, 2))
    assert (one.returncode, two.returncode) == (0, 0), two.stderr
    assert two.stdout == one.stdout


def test_an_adapter_of_the_matrix_that_decoding_absorbs_counts() -> None:
    lora = {"rank": 3, "targets": ["all-linear"]}
    section = configs.tiny_config(configs.DEEPSEEK, lora=lora).model
    values = initial_values(models.blueprint_of(section), 0)
    model: Any = models.fill_parameters(models.build_model(section), lambda name: values(name) + 0.1)
    kv_b = model.layers["0"].attention.kv_b
    expected = kv_b.weight + kv_b.scale * kv_b.lora_B @ kv_b.lora_A
    torch.testing.assert_close(weight_of(kv_b, torch.float32), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads=2: latent attention has one for each head; nearest: 4"),
        ({"topk_group": 3}, "top_k_groups=3"),
        ({"scoring_func": "softmax"}, "scoring_func=softmax: not supported; nearest: sigmoid"),
        ({"topk_method": "greedy"}, "topk_method=greedy: not supported; nearest: noaux_tc"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2: not supported; nearest: 1"),
        ({"n_shared_experts": 0}, "shared_ffn"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim=1.0: not supported",
        ),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method=noaux_tc: not supported"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob=True: not supported; nearest: False"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    ],
)
def test_unsupported_options_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_hf({**V3, **change})


def test_defaults_that_are_read_with_others() -> None:
    """Keys of the file that become others of ours; without them, transformers' defaults."""
    section: Any = from_hf({**V3, "num_hidden_layers": 5, "n_routed_experts": 16})
    keys = ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "intermediate_size")
    rest = {key: value for key, value in V3.items() if key not in keys}
    default: Any = from_hf({**rest, "num_hidden_layers": 5, "n_routed_experts": 16})
    assert (section.expert_groups, section.top_k_groups, section.dense_layers) == (2, 1, "0")
    assert (default.expert_groups, default.top_k_groups, default.dense_layers) == (8, 4, "0-2")
    assert (section.shared_ffn, default.shared_ffn, section.dense_ffn, default.dense_ffn) == (32, 32, 80, 18432)
