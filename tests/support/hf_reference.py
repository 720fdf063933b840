"""Small random transformers models of every family and variant, as references for logits, losses and gradients."""

import copy
import json
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from trainyard.core.constants import IGNORE_INDEX
from trainyard.families import find_family

LLAMA = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
GPT = {
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT |= {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
BERT = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
NEXT = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "full_attention_interval": 2,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
}
ODD_NEXT = {
    "tie_word_embeddings": True,
    "full_attention_interval": None,
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
GRANITE = {"embedding_multiplier": 6.0, "logits_scaling": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.4}
GEMMA2 = {"num_key_value_heads": 2, "head_dim": 20, "sliding_window": 7, "query_pre_attn_scalar": 30}
GEMMA3 = {**GEMMA2, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA2 |= {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 32}
LONGROPE |= {"short_factor": [1.0, 1.25, 1.5, 2.0, 2.0, 2.5], "long_factor": [1.0, 2.0, 3.0, 4.5, 6.0, 8.0]}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-gqa": ("llama", {"num_key_value_heads": 2}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 20, "num_key_value_heads": 2}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-3.1": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA31, "num_key_value_heads": 2}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "deepseek-linear": ("llama", {"rope_theta": 100000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-factor": ("llama", {"rope_scaling": {**YARN, "attention_factor": 1.5, "beta_fast": 8.0}}),
    "llama-yarn-mscale": ("llama", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}}),
    "llama-dynamic": (
        "llama",
        {"max_position_embeddings": 16, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    ),
    "llama-longrope-short": ("llama", {"rope_scaling": LONGROPE}),
    "llama-longrope-long": ("llama", {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 16}}),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": 7}),
    "qwen2-yarn": ("qwen2", {"num_key_value_heads": 2, "rope_parameters": YARN, "rope_theta": 1e6}),
    "qwen3-yarn": ("qwen3", {"num_key_value_heads": 2, "head_dim": 20, "rope_scaling": YARN}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 20}),
    "qwen3_next": ("qwen3_next", {**NEXT, "mlp_only_layers": [0, 1, 2, 3]}),
    "qwen3_next-odd": ("qwen3_next", {**NEXT, **ODD_NEXT, "mlp_only_layers": [0, 1, 2, 3]}),
    "olmo2": ("olmo2", {"num_key_value_heads": 2, "pad_token_id": 0}),
    "olmo2-biases": ("olmo2", {"num_key_value_heads": 2, "attention_bias": True, "pad_token_id": 0}),
    "granite": ("granite", {"num_key_value_heads": 2, **GRANITE}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "gemma": ("gemma", {"num_key_value_heads": 1, "head_dim": 20}),
    "gemma-biases": (
        "gemma",
        {"head_dim": 12, "hidden_act": "gelu", "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2-uncapped": (
        "gemma2",
        {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}
        | {"layer_types": ["full_attention", "sliding_attention"], "hidden_activation": "gelu"},
    ),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3-full": (
        "gemma3_text",
        {**GEMMA3, "layer_types": ["full_attention"] * 2, "final_logit_softcapping": 0.7, "attention_bias": True}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3-windows": (
        "qwen3",
        {"head_dim": 20, "use_sliding_window": True, "sliding_window": 7, "attention_bias": True}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "ministral": ("ministral", {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 7}),
    "ministral-alternate": (
        "ministral",
        {"head_dim": 20, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "smollm3": ("smollm3", {"num_key_value_heads": 2, "num_hidden_layers": 4, "pad_token_id": 0}),
    "smollm3-windows": (
        "smollm3",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 7, "pad_token_id": 0}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "phi3": ("phi3", {"num_key_value_heads": 2, "partial_rotary_factor": 0.5, "pad_token_id": 0}),
    "phi3-longrope": ("phi3", {"sliding_window": 7, "rope_scaling": LONGROPE, "pad_token_id": 0}),
    "glm4": ("glm4", {"num_key_value_heads": 2, "head_dim": 20, "pad_token_id": 0}),
    "glm4-unbiased": (
        "glm4",
        {"head_dim": 16, "attention_bias": False, "partial_rotary_factor": 1.0, "pad_token_id": 0},
    ),
    "stablelm": ("stablelm", {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": (
        "stablelm",
        {"use_parallel_residual": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    ),
    "cohere": ("cohere", {"num_key_value_heads": 2, "logit_scale": 0.3}),
    "cohere-biases": ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
    "phi": ("phi", {"num_key_value_heads": 2}),
    "phi-rotary": ("phi", {"partial_rotary_factor": 0.4, "hidden_act": "gelu", "rope_scaling": YARN}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0, "hidden_act": "relu"}
        | {"tie_word_embeddings": True, "rotary_emb_base": 500},
    ),
    "falcon": ("falcon", {}),
    "falcon-heads": ("falcon", {"multi_query": False, "bias": True, "activation": "gelu_new"}),
    "falcon-sequential": ("falcon", {"parallel_attn": False, "tie_word_embeddings": False, "rope_theta": 500.0}),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 72}),
    "falcon-11b": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "starcoder2": ("starcoder2", {"num_key_value_heads": 2, "sliding_window": 7}),
    "starcoder2-unbiased": (
        "starcoder2",
        {"use_bias": False, "tie_word_embeddings": False, "hidden_act": "relu2"},
    ),
    "opt": ("opt", {}),
    "opt-gelu": ("opt", {"activation_function": "gelu", "tie_word_embeddings": False}),
    "gpt2": ("gpt", {}),
    "gpt2-untied": ("gpt", {"tie_word_embeddings": False}),
    "gpt2-inner-gelu": ("gpt", {"n_inner": 100, "activation_function": "gelu"}),
    "bert": ("bert", {}),
    "bert-gelu-new": ("bert", {"hidden_act": "gelu_new"}),
}
"""Family and changes to its sizes."""
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
DEEPSEEK = {**MLA, "n_routed_experts": 6, "moe_intermediate_size": 32, "num_experts_per_tok": 3}
DEEPSEEK_V2 = {**DEEPSEEK, "n_shared_experts": 2, "first_k_dense_replace": 1}
DEEPSEEK_V3 = {**DEEPSEEK, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
DEEPSEEK_V3 |= {"num_nextn_predict_layers": 0}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
QWEN2_MOE = {**QWEN_MOE, "shared_expert_intermediate_size": 56}
GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 9}
LLAMA4 = {"num_local_experts": 6, "head_dim": 16, "floor_scale": 4, "num_hidden_layers": 4}
MOE_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_key_value_heads": 2, "head_dim": 20, "num_experts": 6, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 32, "norm_topk_prob": False},
    ),
    "qwen3_moe-dense-layers": (
        "qwen3_moe",
        {**QWEN_MOE, "num_key_value_heads": 2, "head_dim": 20, "mlp_only_layers": [0], "num_hidden_layers": 3},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {**QWEN_MOE, "shared_expert_intermediate_size": 56, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen2_moe-every-other": (
        "qwen2_moe",
        {**QWEN2_MOE, "num_key_value_heads": 2, "decoder_sparse_step": 2, "num_hidden_layers": 4},
    ),
    "qwen3_next-experts": ("qwen3_next", NEXT),
    "qwen3_next-dense-layers": (
        "qwen3_next",
        {**NEXT, "linear_num_value_heads": 2, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "gpt_oss": ("gpt_oss", {**GPT_OSS, "num_key_value_heads": 2, "swiglu_limit": 0.3}),
    "gpt_oss-full-layers": (
        "gpt_oss",
        {**GPT_OSS, "attention_bias": False, "layer_types": ["full_attention", "sliding_attention"]}
        | {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "default"}, "swiglu_alpha": 1.1},
    ),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK_V2),
    "deepseek_v2-lite": (
        "deepseek_v2",
        {**DEEPSEEK_V2, "q_lora_rank": None, "attention_bias": True, "n_group": 1, "topk_group": 1}
        | {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {**DEEPSEEK_V2, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}
        | {"first_k_dense_replace": 0, "routed_scaling_factor": 16.0, "tie_word_embeddings": True},
    ),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK_V3),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {**DEEPSEEK_V3, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "attention_bias": True},
    ),
    "deepseek_v3-halves": (
        "deepseek_v3",
        {**DEEPSEEK_V3, "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_group": 1}
        | {"rope_parameters": {**YARN, "mscale": 0.5, "mscale_all_dim": 1.0}, "rms_norm_eps": 1e-2},
    ),
    "deepseek_v3-dense": ("deepseek_v3", {**DEEPSEEK_V3, "first_k_dense_replace": 3}),
    "llama4_text": ("llama4_text", {**LLAMA4, "num_key_value_heads": 2}),
    "llama4_text-dense-layers": (
        "llama4_text",
        {**LLAMA4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 72, "attention_chunk_size": 120}
        | {"no_rope_layer_interval": 2, "attn_scale": 0.5, "attention_bias": True, "num_experts_per_tok": 2}
        | {"rope_scaling": LLAMA31},
    ),
    "llama4_text-full-attention": (
        "llama4_text",
        {**LLAMA4, "num_hidden_layers": 2, "moe_layers": [1], "intermediate_size_mlp": 72, "use_qk_norm": False}
        | {"layer_types": ["full_attention"] * 2, "attn_temperature_tuning": False, "no_rope_layers": [1, 0]},
    ),
    "olmoe": ("olmoe", {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe-normalized": (
        "olmoe",
        {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
}
"""Mixtures of experts, whose modules have other names than their files: compare files, not modules."""
OTHER_BLOCKS = ("llama", "gpt", "opt", "bert", "qwen3_next")
LLAMA_LIKE = [name for name, (family, _) in VARIANTS.items() if name == family and name not in OTHER_BLOCKS]
"""Variants of the families that share Llama's block, one each."""
ROPE_VARIANTS = [name for name in VARIANTS if "rope" in name or "yarn" in name or "dynamic" in name]
"""Models whose context was extended."""
LAYER_NORM = {**{key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}, "layer_norm_eps": 1e-5}
FALCON = {key: LLAMA[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
OPT = {**FALCON, "max_position_embeddings": 64, "ffn_dim": 80, "dropout": 0.0, "pad_token_id": 0}
SIZES = {"gpt": GPT, "bert": BERT, "falcon": {**FALCON, "max_position_embeddings": 64}, "opt": OPT}
SIZES |= dict.fromkeys(("cohere", "stablelm", "phi"), LAYER_NORM)
SIZES["gpt_neox"] = {key: value for key, value in LAYER_NORM.items() if key != "num_key_value_heads"}
SIZES["starcoder2"] = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
"""Sizes of families with other keys than Llama's."""


def hf_reference(variant: str) -> tuple[str, nn.Module, dict[str, Any]]:
    """(family, model, config.json) of a random transformers model."""
    model = hf_model(variant)
    return VARIANTS[variant][0], model, json.loads(model.config.to_json_string())


def hf_model(variant: str, **changes: Any) -> Any:
    """A random transformers model; `changes` are keys of its config.json."""
    family, sizes = {**VARIANTS, **MOE_VARIANTS}[variant]
    hf = find_family(family).hf
    keys = copy.deepcopy({**SIZES.get(family, LLAMA), **sizes, **changes})  # transformers adds to RoPE's
    config = transformers.AutoConfig.for_model(hf.model_type, **keys)
    torch.manual_seed(1)
    model = getattr(transformers, hf.architecture)(config)
    with torch.no_grad():
        for parameter in model.parameters():  # make biases and norms random too
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def known_keys(variant: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Those keys of config.json that the family of a variant has."""
    known = {hf_key for hf_key, _ in find_family({**VARIANTS, **MOE_VARIANTS}[variant][0]).hf.keys.values()}
    return {key: value for key, value in keys.items() if key in known}


def hf_forward(family: str, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits at the positions where our model has them, and transformers' own loss."""
    tokens = batch["tokens"].long()
    cross_entropy = nn.functional.cross_entropy
    if family != "bert":
        logits = model(input_ids=tokens).logits
        return logits, cross_entropy(logits.flatten(0, 1), batch["labels"].long().flatten(), ignore_index=IGNORE_INDEX)
    labels = torch.full(tokens.shape, IGNORE_INDEX)
    for sample in range(len(tokens)):
        positions = batch["masked_positions"][sample].tolist()
        for position, label in zip(positions, batch["labels"][sample].tolist(), strict=True):
            labels[sample, position] = label
    out = model(
        input_ids=tokens,
        attention_mask=batch["attention_mask"].long(),
        token_type_ids=batch["segment_ids"].long(),
        labels=labels,
        next_sentence_label=batch["next_sentence_labels"],
    )
    index = batch["masked_positions"].long().unsqueeze(-1).expand(-1, -1, out.prediction_logits.shape[-1])
    return out.prediction_logits.gather(1, index), out.loss
