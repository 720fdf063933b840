"""Defaults of config.json: a key that a file leaves out has the value that transformers gives it, in every family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.support import configs
from tests.support.hf_reference import BERT, GPT, LLAMA, LLAMA31, hf_forward
from trainyard import models
from trainyard.checkpoint.weights import local_values
from trainyard.core.errors import UserError
from trainyard.families import Family, ModelConfig, find_family
from trainyard.families.decoder_keys import ACTIVATIONS
from trainyard.families.family import REQUIRED
from trainyard.families.hf_config import from_hf
from trainyard.families.registry import FAMILIES
from trainyard.formats.hf import open_hf

DECODER = {**LLAMA, "hidden_size": 64, "num_attention_heads": 32, "num_key_value_heads": 2, "rms_norm_eps": 1e-3}
DECODER |= {"rope_theta": 500.0, "max_position_embeddings": 80, "initializer_range": 0.5, "tie_word_embeddings": True}
DECODER |= {"head_dim": 6, "bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 8}
LAYER_NORM = {**{key: value for key, value in DECODER.items() if key != "rms_norm_eps"}, "layer_norm_eps": 1e-3}
NEOX = {key: value for key, value in LAYER_NORM.items() if key not in ("num_key_value_heads", "head_dim", "rope_theta")}
FALCON = {key: value for key, value in NEOX.items() if key not in ("intermediate_size", "layer_norm_eps")}
STARCODER = {key: value for key, value in LAYER_NORM.items() if key != "layer_norm_eps"}
OPT = {key: value for key, value in FALCON.items() if key != "initializer_range"}
EXPERTS = {"num_experts_per_tok": 3, "router_aux_loss_coef": 0.25}
QWEN_EXPERTS = {"num_experts": 9, "moe_intermediate_size": 24, "norm_topk_prob": True}
NEXT = {"linear_num_key_heads": 8, "linear_num_value_heads": 48, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
NEXT |= {"linear_conv_kernel_dim": 3, "shared_expert_intermediate_size": 40, "norm_topk_prob": False}
DEEPSEEK = {key: value for key, value in DECODER.items() if key not in ("head_dim", "num_key_value_heads")}
DEEPSEEK |= {"hidden_size": 128, "num_attention_heads": 128, "n_routed_experts": 16, "num_experts_per_tok": 3}
DEEPSEEK |= {"q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
DEEPSEEK |= {"moe_intermediate_size": 24, "routed_scaling_factor": 1.5, "attention_bias": True}
FILES: dict[str, dict[str, Any]] = {
    "llama": {**DECODER, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "granite": {**DECODER, "attention_bias": True, "mlp_bias": True}
    | {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.4},
    "gemma": {**DECODER, "tie_word_embeddings": False, "attention_bias": True},
    "gemma2": {**DECODER, "tie_word_embeddings": False, "sliding_window": 7, "attention_bias": True}
    | {"query_pre_attn_scalar": 30, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    | {"hidden_activation": "gelu", "layer_types": ["full_attention", "sliding_attention"]},
    "olmo2": {**DECODER, "attention_bias": True},
    "mistral": {**DECODER, "sliding_window": 7},
    "mixtral": {**DECODER, **EXPERTS, "sliding_window": 7, "num_local_experts": 9},
    "qwen2": DECODER,
    "qwen3": {**DECODER, "attention_bias": True},
    "gemma3_text": {**DECODER, "tie_word_embeddings": False, "sliding_window": 7, "attention_bias": True}
    | {"query_pre_attn_scalar": 30, "final_logit_softcapping": 3.0}
    | {"hidden_activation": "gelu", "layer_types": ["full_attention", "sliding_attention"]},
    "ministral": {**DECODER, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]},
    "smollm3": {**DECODER, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "phi3": {**DECODER, "sliding_window": 7},
    "glm4": {**DECODER, "num_key_value_heads": 4, "attention_bias": False},
    "stablelm": {**LAYER_NORM, "use_qkv_bias": True, "use_parallel_residual": True},
    "cohere": {**LAYER_NORM, "tie_word_embeddings": False, "attention_bias": True, "logit_scale": 0.5}
    | {"bos_token_id": 3},
    "phi": {**{key: value for key, value in LAYER_NORM.items() if key[:3] != "tie"}, "hidden_act": "gelu"},
    "gpt_neox": {**NEOX, "rotary_emb_base": 500.0, "use_parallel_residual": False}
    | {"attention_bias": False, "hidden_act": "relu"},
    "falcon": {**FALCON, "layer_norm_epsilon": 1e-3, "bias": True, "activation": "relu", "ffn_hidden_size": 60}
    | {"tie_word_embeddings": False, "rope_theta": 500.0},
    "starcoder2": {**STARCODER, "norm_epsilon": 1e-3, "sliding_window": 7, "use_bias": False, "hidden_act": "relu"}
    | {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "opt": {**OPT, "ffn_dim": 60, "dropout": 0.2, "attention_dropout": 0.3, "tie_word_embeddings": False}
    | {"init_std": 0.5, "activation_function": "gelu"},
    "qwen2_moe": {**DECODER, **EXPERTS, **QWEN_EXPERTS, "shared_expert_intermediate_size": 40, "qkv_bias": False},
    "qwen3_moe": {**DECODER, **EXPERTS, **QWEN_EXPERTS},
    "qwen3_next": {**DECODER, **EXPERTS, **QWEN_EXPERTS, **NEXT, "num_experts": 12, "num_key_value_heads": 4},
    "gpt_oss": {**DECODER, **EXPERTS, "num_local_experts": 9, "sliding_window": 7, "attention_bias": False}
    | {"swiglu_alpha": 1.1, "swiglu_limit": 0.5},
    "llama4_text": {**DECODER, **EXPERTS, "num_local_experts": 9, "use_qk_norm": False, "attention_bias": True}
    | {"floor_scale": 3},
    "olmoe": {**DECODER, **EXPERTS, "num_experts": 9, "norm_topk_prob": True},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": {**DEEPSEEK, "norm_topk_prob": False, "rope_interleave": False, "num_nextn_predict_layers": 2},
    "gpt": {**GPT, "n_inner": 60, "layer_norm_epsilon": 1e-3, "initializer_range": 0.5, "tie_word_embeddings": False}
    | {"activation_function": "gelu", "pad_token_id": 8, "bos_token_id": 5, "eos_token_id": 6},
    "bert": {**BERT, "type_vocab_size": 3, "layer_norm_eps": 1e-3, "initializer_range": 0.5, "hidden_act": "gelu_new"}
    | {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 8},
}
"""A file of each family in which every key that is read has another value than its default."""


def hf_config(family: Family, data: dict[str, Any]) -> Any:
    """The configuration as transformers reads it."""
    cls = transformers.CONFIG_MAPPING[family.hf.model_type]
    return cls.from_dict(json.loads(json.dumps(data)))


def values_of_transformers(family: Family, data: dict[str, Any]) -> dict[str, Any]:
    """What transformers computes with, by our key."""
    config = hf_config(family, data)
    values = {key: getattr(config, hf_key, None) for key, (hf_key, _) in family.hf.keys.items()}
    if "rope_theta" in values:
        rope = config.rope_parameters
        values["rope_theta"] = rope.get("full_attention", rope)["rope_theta"]
    if "head_dim" in values:
        values["head_dim"] = values["head_dim"] or config.hidden_size // config.num_attention_heads
    if chunk := getattr(config, "attention_chunk_size", None):
        values["max_positions"] = min(values["max_positions"], chunk)  # beyond, layers attend within chunks
    if "activation" in family.config_class.model_fields:
        keys = ("activation_function", "activation", "hidden_activation", "hidden_act")
        name = next(name for key in keys if (name := getattr(config, key, None)))
        values["activation"] = {**ACTIVATIONS, "gelu_new": "gelu_tanh"}[name]
    if isinstance(kinds := getattr(config, "layer_types", None), list) and "full_layers" in dir(family.config_class):
        has_windows = config.sliding_window is not None
        values["full_layers"] = [layer for layer, kind in enumerate(kinds) if kind[0] == "f" or not has_windows]
    ids = values["eos_token_id"]
    return values | {"eos_token_id": (ids,) if isinstance(ids, int) else ids and tuple(ids)}


def values_read(section: ModelConfig, keys: Any) -> dict[str, Any]:
    values = {key: getattr(section, key) for key in keys}
    if "full_layers" in values:
        values["full_layers"] = [layer for layer in range(section.layers) if section.attention_window(layer) is None]
    if "kv_heads" in values:
        values |= {"kv_heads": section.num_kv_heads, "head_dim": section.head_size}
    return values


@pytest.mark.parametrize("name", sorted(FAMILIES.built_in))
def test_a_missing_key_has_the_default_of_transformers(name: str) -> None:
    """Each key is left out in turn. Without a size that has no default here, the file is refused by its name."""
    family, data = find_family(name), {"model_type": find_family(name).hf.model_type, **FILES[name]}
    expected = values_of_transformers(family, data)
    assert values_read(from_hf(data), expected) == expected
    required = {hf_key for hf_key, default in family.hf.keys.values() if default is REQUIRED}
    assert set(data) >= {hf_key for hf_key, _ in family.hf.keys.values()}
    for key in FILES[name]:
        rest = {other: value for other, value in data.items() if other != key}
        if key in required:
            with pytest.raises(UserError, match=f"config.json: {key}: missing"):
                from_hf(rest)
            continue
        without = values_of_transformers(family, rest)
        assert values_read(from_hf(rest), without) == without, key
        if key != "intermediate_size":  # of no use beside moe_intermediate_size
            assert without != expected, f"{key}: the file of this test has its default"
    defaults = hf_config(family, {"model_type": family.hf.model_type})
    assert {key: getattr(defaults, key, value) for key, value in family.hf.fixed.items()} == family.hf.fixed


SIZES = {"llama": LLAMA, "gpt": GPT, "bert": BERT, "qwen3_next": {"num_hidden_layers": 4}}
MANY_EXPERTS = {"qwen2_moe": {"num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"}}
MANY_EXPERTS["qwen3_next"] = MANY_EXPERTS["qwen2_moe"] | {"num_experts_per_tok", "linear_num_value_heads"}
MANY_EXPERTS |= {"qwen3_moe": {"num_experts", "moe_intermediate_size"}, "olmoe": {"num_experts"}}
MANY_EXPERTS |= {"deepseek_v2": {"n_routed_experts", "moe_intermediate_size"}}
MANY_EXPERTS |= {"deepseek_v3": {"num_key_value_heads"}}  # with fewer heads, the default has no meaning
MANY_EXPERTS |= {"llama4_text": {"intermediate_size"}}
MANY_EXPERTS |= {"gpt_oss": {"num_local_experts", "intermediate_size"}}
"""Keys whose values here are smaller than their defaults."""
LOGITS_SIZES = {**LLAMA, "hidden_size": 64, "num_attention_heads": 32}


@pytest.mark.parametrize("name", sorted(FAMILIES.built_in))
def test_logits_of_a_file_with_sizes_only(name: str, tmp_path: Path) -> None:
    """transformers builds the model from a config.json without any key that has a default; so does the package."""
    family = find_family(name)
    sizes = {**LOGITS_SIZES, **SIZES.get(name, {}), "num_experts": 9, "moe_intermediate_size": 16, "head_dim": 8}
    sizes |= {"shared_expert_intermediate_size": 24, "n_routed_experts": 9, "num_experts_per_tok": 3}
    sizes |= {"ffn_dim": 80, "num_attention_heads": 8} if name in ("opt", "phi", "gpt_neox") else {}
    sizes["linear_num_value_heads"] = 16
    if "deepseek" in name:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    keep = {hf_key for hf_key, default in family.hf.keys.values() if default is REQUIRED}
    if name in MANY_EXPERTS:
        keep |= MANY_EXPERTS[name]
    keep |= {"head_dim"} if name == "ministral" else set()  # which transformers needs
    data = {"model_type": family.hf.model_type, **{key: value for key, value in sizes.items() if key in keep}}
    if (family.hf.keys["pad_token_id"][1] or 0) >= sizes["vocab_size"]:
        data["pad_token_id"] = 0
    torch.manual_seed(1)
    model = getattr(transformers, family.hf.architecture)(hf_config(family, data)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(data))
    weights = open_hf(tmp_path)
    values = local_values(weights)
    ours = models.fill_parameters(models.build_model(weights.model), lambda key: values(key).clone()).eval()
    batch: dict[str, Tensor] = configs.tiny_batch("bert" if name == "bert" else "llama")
    with torch.no_grad():
        expected, _ = hf_forward(name, model, batch)
        torch.testing.assert_close(ours(batch).logits(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 0}, "rope_theta=0: Input should be greater than 1"),
        ({"rope_theta": None}, "rope_theta=None: Input should be a valid number"),
        ({"rope_parameters": {"rope_theta": 0.0}}, "rope_theta=0.0: Input should be greater than 1"),
        ({"rope_scaling": {**LLAMA31, "factor": None}}, "factor=None: Input should be a valid number"),
    ],
)
def test_a_base_that_is_no_base_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_hf({"model_type": "mixtral", **FILES["mixtral"], **changes})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "linear", "factor": 4}, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 20.0, "rope_type": "default"}},
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 20, "rope_type": "linear", "factor": 2}},
        {"rope_scaling": {key: value for key, value in LLAMA31.items() if not key.startswith("original")}},
    ],
)
@pytest.mark.parametrize("theta", [{}, {"rope_theta": 300}])
def test_rope_keys_that_disagree_are_read_as_transformers_does(rope: dict[str, Any], theta: dict[str, int]) -> None:
    data = {key: value for key, value in FILES["mixtral"].items() if key != "rope_theta"}
    data = {"model_type": "mixtral", **data, **rope, **theta}
    expected = hf_config(find_family("mixtral"), data).rope_parameters
    section: Any = from_hf(data)
    assert section.rope_theta == expected["rope_theta"]
    assert (section.rope_scaling.kind if section.rope_scaling else "default") == expected["rope_type"]
    if section.rope_scaling:
        assert section.rope_scaling.factor == expected["factor"]
    if expected["rope_type"] == "llama3":
        assert section.rope_scaling.original_max_positions == expected["original_max_position_embeddings"]
