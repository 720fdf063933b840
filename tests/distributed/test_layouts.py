"""Every layout trains the same model as one rank, step by step.

Each case runs on up to eight gloo ranks and on one rank: initial weights and batches are equal bit for bit, losses to
1e-6, every gradient of every step and every final weight to 1e-5 of its tensor's largest element, in fp32. The fast
tier runs two steps of four samples, the nightly tier ten steps of eight samples with deeper models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support import configs
from tests.support.frozen_linear import frozen
from tests.support.hf_reference import LLAMA_LIKE, hf_reference
from tests.support.pool import Pool, RankFailed
from tests.support.scaled_linear import scaled
from tests.support.two_kinds import TWO_KINDS
from trainyard.compat import supports_zero_bubble
from trainyard.config.schema import Config
from trainyard.families.hf_config import from_hf
from trainyard.preflight.verify import VerifyRecord, compare_records, single_rank_config


@dataclass(frozen=True)
class Size:
    """How much of a training a case compares. Micro batches have one sample, so gradients always accumulate."""

    steps: int
    global_batch: int
    layers: int


FAST, NIGHTLY = Size(steps=2, global_batch=4, layers=2), Size(steps=10, global_batch=8, layers=4)
PIPELINE_LAYERS = 4
"""Every pipeline stage gets a layer, at both sizes."""

# Dropout is on because its masks must not depend on the layout.
LLAMA = configs.LLAMA
GPT = {**configs.GPT, "hidden_dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1}
MOE = configs.MOE
CAPACITY = {**MOE, "capacity_factor": 0.75}
BIAS = {**MOE, "router_bias": True, "bias_update_rate": 0.02}
SHARED = {**BIAS, "shared_ffn": 40, "router_scores": "sigmoid", "routed_scale": 1.5, "dense_layers": "0"}
SHARED |= {"experts": 8, "expert_groups": 4, "top_k_groups": 2, "top_k": 3, "dense_ffn": 72}
"""A mixture of experts as DeepSeek-V3 has it."""
GPT_OSS = {**MOE, "family": "gpt_oss", "head_dim": 8, "sliding_window": 7}
OLMOE = {**MOE, "family": "olmoe", "top_k": 2}
QWEN2_MOE = {**MOE, "family": "qwen2_moe", "top_k": 2, "shared_ffn": 40, "dense_layers": "odd"}
LLAMA4 = {**MOE, "family": "llama4_text", "top_k": 2, "shared_ffn": 40, "head_dim": 8, "query_scale_interval": 4}
LLAMA4 |= {"no_rope_layers": "odd"}
DEEPSEEK = configs.DEEPSEEK
WITHOUT_MTP = {key: value for key, value in DEEPSEEK.items() if "mtp" not in key}
DEEPSEEK_V2 = {**WITHOUT_MTP, "family": "deepseek_v2", "expert_groups": 1}
BERT = {**configs.BERT, "hidden_dropout": 0.1, "attention_dropout": 0.1}
LLAMA_LIKE_MODELS = [from_hf(hf_reference(name)[2]).model_dump(mode="json") for name in LLAMA_LIKE]
OPT = {**from_hf(hf_reference("opt")[2]).model_dump(mode="json"), "hidden_dropout": 0.1}
PHI = {**from_hf(hf_reference("phi")[2]).model_dump(mode="json"), "vocab": 263, "activation": "relu2"}
NEW_BLOCKS = ("qwen2", "qwen3", "olmo2", "gemma2", "cohere", "phi")
"""Families whose blocks have what those before them do not; the fast tier has no others."""
MIXED = {**TWO_KINDS, "dense_layers": "0"}
"""A dense layer, then layers with experts; every other layer has a window."""
NEXT = from_hf(hf_reference("qwen3_next")[2]).model_dump(mode="json")
NEXT |= {"attention_layers": "odd", "dense_layers": "0-"}
"""Gated delta nets with attention in every other layer."""
NEXT_MOE = {**NEXT, "dense_layers": None, "dense_ffn": None, "balance_loss": 0.1}
ODD_VOCAB = {"vocab": 263}
"""A vocabulary that no number of ranks divides."""
SP = {"sequence_parallel": True}
UNEVEN_COUNTS = {"train": {"global_batch": 8, "micro_batch": 2}}
"""A batch whose ranks have different numbers of masked tokens."""
QLORA = {**configs.LLAMA, "hidden": 128, "ffn": 256, "heads": 4, "kv_heads": 2}
"""Matrices that two ranks split into whole blocks of nf4."""
NF4 = {"rank": 3, "base": "nf4"}
LORA = {"rank": 3, "dora": True, "dropout": 0.2, "lr_ratio": 4.0, "train": ["norms"]}
EXPERTS = {"rank": 3, "lr_ratio": 4.0, "targets": ["all-linear", "experts"], "train": ["norms"]}
NOISE = {"embedding_noise": 5.0}

SELECTIVE = {"kind": "selective", "modules": ["norm", "activation", "attention"]}
USER_CODE = {
    "data": {"source": "tests.support.user_code:make_dataset"},
    "optimizer": {"kind": "tests.support.user_code:Momentum"},
    "schedule": {"kind": "tests.support.user_code:triangle"},
}
"""Data, update rule and schedule of a user."""


def case(
    ranks: int,
    layout: dict[str, Any],
    model: dict[str, Any] = LLAMA,
    name: str = "",
    marks: Sequence[pytest.MarkDecorator] = (),
    **sections: dict[str, Any],
) -> Any:
    labels = [model["family"], *(f"{key}{value}" for key, value in layout.items()), name]
    case_id = f"{ranks}-" + "-".join(label for label in labels if label)
    return pytest.param(ranks, layout, model, sections, id=case_id, marks=marks)


def deep_case(*arguments: Any, **sections: Any) -> Any:
    """A case whose parts the fast tier has in other cases."""
    return case(*arguments, marks=[pytest.mark.nightly], **sections)


CASES = [
    # tensor parallel, with and without sequence parallel
    deep_case(2, {"tp": 2}),
    case(2, {"tp": 2, **SP}),
    deep_case(2, {"tp": 2, **SP}, GPT),
    deep_case(2, {"tp": 2}, GPT),
    deep_case(2, {"tp": 2}, BERT),
    case(2, {"tp": 2, **SP}, BERT),
    case(4, {"tp": 4, **SP}, {**LLAMA, "kv_heads": 1}, "kv1"),
    deep_case(4, {"tp": 4}, LLAMA, "kv2"),
    deep_case(3, {"tp": 3}, {**LLAMA, "heads": 6, "hidden": 48, "kv_heads": 2}, "kv2-of-6"),
    deep_case(2, {"tp": 2, **SP}, {**LLAMA, "fuse_qkv": False, "fuse_gate_up": False}, "unfused"),
    case(2, {"tp": 2}, {**GPT, "fuse_qkv": False, "tie_embeddings": False}, "unfused-untied"),
    deep_case(4, {"tp": 4, **SP}, {**LLAMA, **ODD_VOCAB}, "padded-vocab"),
    deep_case(4, {"tp": 4}, {**BERT, "vocab": 131}, "padded-vocab"),
    deep_case(2, {"tp": 2, **SP}, {**LLAMA, "tie_embeddings": True}, "tied"),
    # context parallel
    case(2, {"cp": 2}),
    deep_case(2, {"cp": 2, "cp_method": "all_gather"}),
    deep_case(4, {"cp": 4}, GPT),
    deep_case(2, {"cp": 2}, BERT),
    case(2, {"cp": 2}, LLAMA, "documents", data={"document_mask": True, "seq_len": 64}),
    case(4, {"cp": 4, "cp_method": "all_gather"}, GPT, "documents", data={"document_mask": True, "seq_len": 64}),
    deep_case(4, {"cp": 2, "tp": 2, **SP}),
    deep_case(4, {"cp": 2, "pp": 2}),
    deep_case(4, {"cp": 2, "zero": 1}, LLAMA, "dp2"),
    # pipeline
    deep_case(2, {"pp": 2}),
    case(4, {"pp": 4}, GPT, "tied"),
    deep_case(2, {"pp": 2}, {**LLAMA, "tie_embeddings": True}, "tied"),
    deep_case(2, {"pp": 2}, BERT),
    case(2, {"pp": 2, "vpp": 2}),
    deep_case(2, {"pp": 2, "pipeline_cuts": (0,)}, GPT, "cuts"),
    case(3, {"pp": 3}, LLAMA, "uneven"),
    case(2, {"pp": 2, "pipeline_schedule": "zero_bubble"}),
    deep_case(2, {"pp": 2, "vpp": 2, "pipeline_schedule": "zbv"}, GPT, "tied"),
    case(4, {"pp": 2, "vpp": 2, "pipeline_schedule": "zbv", "zero": 1}, GPT, "tied"),
    deep_case(2, {"pp": 2, "pipeline_schedule": "zero_bubble"}, LLAMA, "bf16", precision={"kind": "bf16"}),
    deep_case(4, {"pp": 4}, LLAMA, "few-micro-batches", train={"global_batch": 8, "micro_batch": 4}),
    # data parallel
    deep_case(2, {}),
    case(4, {}, BERT, **UNEVEN_COUNTS),
    deep_case(2, {"zero": 1}),
    deep_case(4, {"zero": 1, "bucket_mib": 1}, BERT),
    deep_case(3, {"zero": 1}, LLAMA, "odd-shards", train={"global_batch": 6}),
    deep_case(2, {"zero": 2}),
    deep_case(2, {"zero": 3}),
    case(3, {"zero": 3}, GPT, "odd-shards", train={"global_batch": 6}),
    # combinations, as in the recipes
    deep_case(8, {"tp": 2, "pp": 2, "zero": 1, **SP}),
    case(8, {"tp": 2, "pp": 2, "zero": 1, **SP}, GPT),
    deep_case(8, {"tp": 4, "zero": 1, **SP}, {**LLAMA, "kv_heads": 1}, "kv1"),
    case(8, {"tp": 2, "pp": 2, "cp": 2, **SP}, {**LLAMA, "kv_heads": 1}, "kv1"),
    deep_case(4, {"tp": 2, "zero": 2}),
    deep_case(4, {"tp": 2, "zero": 3, **SP}, BERT),
    case(4, {"pp": 2, "zero": 3}, LLAMA),
    deep_case(4, {"pp": 2, "vpp": 2, "tp": 2, **SP}, {**LLAMA, "tie_embeddings": True}, "tied"),
    # recompute, optimizer and precision kinds
    case(2, {"tp": 2, **SP}, GPT, "attention", recompute={"kind": "attention"}),
    deep_case(4, {"tp": 2, "pp": 2}, LLAMA, "full", recompute={"kind": "full"}),
    case(
        4, {"tp": 2, "cp": 2}, LLAMA, "selective", recompute={"kind": "selective", "modules": ["core_attention", "mlp"]}
    ),
    deep_case(4, {"zero": 3, "tp": 2}, LLAMA, "full", recompute={"kind": "full"}),
    case(4, {"tp": 2, "zero": 1}, LLAMA, "lamb", optimizer={"kind": "lamb"}),
    deep_case(2, {}, LLAMA, "muon", optimizer={"kind": "muon"}),
    deep_case(4, {"tp": 2, "zero": 1}, LLAMA, "muon", optimizer={"kind": "muon"}),
    deep_case(4, {"tp": 4, **SP}, {**LLAMA, "kv_heads": 1}, "muon-kv1", optimizer={"kind": "muon"}),
    case(3, {"zero": 1}, GPT, "muon-odd-shards", optimizer={"kind": "muon"}, train={"global_batch": 6}),
    deep_case(4, {"pp": 2, "zero": 2}, BERT, "muon", optimizer={"kind": "muon"}),
    deep_case(8, {"tp": 2, "pp": 2, "zero": 1, **SP}, LLAMA, "muon", optimizer={"kind": "muon"}),
    case(2, {"tp": 2, **SP}, LLAMA, "user-code", **USER_CODE),
    deep_case(4, {"pp": 2, "zero": 1}, LLAMA, "user-code", **USER_CODE),
    deep_case(2, {"zero": 3}, LLAMA, "user-code", **USER_CODE),
    case(4, {"tp": 2, "zero": 1, **SP}, LLAMA, "bf16", precision={"kind": "bf16"}),
    deep_case(4, {"tp": 2, "zero": 1}, LLAMA, "bf16-reduce", precision={"kind": "bf16", "reduce_dtype": "bf16"}),
    deep_case(4, {"pp": 2, "zero": 2}, LLAMA, "bf16", precision={"kind": "bf16"}),
    case(4, {"tp": 2, "zero": 1}, BERT, "bf16_sr", precision={"kind": "bf16_sr"}),
    # mixtures of experts, whose router losses must not depend on the layout
    deep_case(2, {}, MOE),
    deep_case(2, {"tp": 2}, MOE),
    deep_case(2, {"tp": 2, **SP}, MOE),
    case(2, {"cp": 2}, MOE),
    deep_case(2, {"pp": 2}, MOE),
    deep_case(2, {"zero": 1}, MOE),
    deep_case(4, {"tp": 2, "zero": 2}, MOE),
    case(4, {"tp": 2, "zero": 3, **SP}, MOE),
    deep_case(4, {"cp": 2, "pp": 2}, MOE),
    deep_case(4, {"pp": 2, "zero": 3}, MOE),
    deep_case(4, {"tp": 4, **SP}, {**MOE, "kv_heads": 1}, "kv1"),
    case(8, {"tp": 2, "pp": 2, "cp": 2, **SP}, MOE),
    deep_case(8, {"tp": 2, "pp": 2, "zero": 1, **SP}, MOE),
    deep_case(2, {"pp": 2, "pipeline_schedule": "zero_bubble"}, MOE),
    deep_case(4, {"tp": 2, "cp": 2}, MOE, "full", recompute={"kind": "full"}),
    deep_case(4, {"tp": 2, "zero": 1}, MOE, "muon", optimizer={"kind": "muon"}),
    deep_case(4, {"tp": 2, "zero": 1}, MOE, "lamb", optimizer={"kind": "lamb"}),
    # expert parallel: ranks divide the experts, and other parameters as before
    deep_case(2, {"ep": 2}, MOE),
    deep_case(2, {"ep": 2, "zero": 1}, MOE),
    deep_case(2, {"ep": 2, "zero": 2}, MOE),
    case(2, {"ep": 2, "zero": 3}, MOE, "alone"),
    deep_case(2, {"ep": 2, "cp": 2}, MOE),
    deep_case(4, {"ep": 2}, MOE),
    case(4, {"ep": 2, "zero": 1}, MOE),
    deep_case(4, {"ep": 2, "zero": 2}, MOE),
    deep_case(4, {"ep": 2, "zero": 3}, MOE),
    deep_case(4, {"ep": 4}, MOE),
    deep_case(4, {"ep": 4, "zero": 1, "bucket_mib": 1}, MOE),
    deep_case(4, {"ep": 4, "zero": 3}, MOE),
    deep_case(4, {"ep": 2, "tp": 2}, MOE),
    deep_case(4, {"ep": 2, "tp": 2, **SP}, MOE),
    deep_case(4, {"ep": 2, "tp": 2, "zero": 1, **SP}, MOE),
    deep_case(4, {"ep": 2, "tp": 2, "zero": 3, **SP}, MOE),
    deep_case(4, {"ep": 2, "pp": 2}, MOE),
    deep_case(4, {"ep": 2, "pp": 2, "zero": 1}, MOE),
    deep_case(4, {"ep": 2, "pp": 2, "zero": 2}, MOE),
    deep_case(4, {"ep": 2, "pp": 2, "pipeline_schedule": "zero_bubble"}, MOE),
    deep_case(4, {"ep": 2, "pp": 2, "vpp": 2}, MOE),
    deep_case(4, {"ep": 2, "cp": 2, "zero": 1}, MOE),
    deep_case(4, {"ep": 4, "cp": 2}, MOE),
    deep_case(4, {"ep": 2, "cp": 2, "pp": 2}, MOE),
    deep_case(8, {"ep": 4, "tp": 2, "cp": 2, "zero": 1, **SP}, MOE),
    deep_case(8, {"ep": 2, "tp": 2, "pp": 2, "zero": 1, **SP}, MOE),
    deep_case(8, {"ep": 2, "tp": 2, "pp": 2, "zero": 3, **SP}, MOE),
    deep_case(8, {"ep": 2, "tp": 2, "pp": 2, "cp": 2, **SP}, MOE),
    deep_case(3, {"ep": 3, "zero": 1}, {**MOE, "experts": 6}, "odd-shards", train={"global_batch": 6}),
    deep_case(6, {"ep": 2, "zero": 1}, MOE, "odd-shards", train={"global_batch": 6}),
    deep_case(4, {"ep": 2, "zero": 1}, MOE, "full", recompute={"kind": "full"}),
    deep_case(4, {"ep": 2, "tp": 2}, MOE, "selective", recompute={"kind": "selective", "modules": ["mlp"]}),
    case(4, {"ep": 2, "zero": 1}, MOE, "muon", optimizer={"kind": "muon"}),
    deep_case(4, {"ep": 2, "tp": 2}, MOE, "muon", optimizer={"kind": "muon"}),
    deep_case(4, {"ep": 2}, MOE, "lamb", optimizer={"kind": "lamb"}),
    deep_case(4, {"ep": 2, "zero": 1}, MOE, "bf16", precision={"kind": "bf16"}),
    deep_case(4, {"ep": 2, "zero": 1}, MOE, "bf16_sr", precision={"kind": "bf16_sr"}),
    deep_case(4, {"ep": 2, "zero": 1}, MOE, "user-code", **USER_CODE),
    # experts with a capacity, whose dropped tokens must not depend on the layout
    deep_case(2, {"ep": 2}, CAPACITY, "capacity"),
    case(4, {"ep": 2, "cp": 2, "tp": 2, **SP}, CAPACITY, "capacity"),
    deep_case(2, {"cp": 2}, CAPACITY, "capacity"),
    deep_case(4, {"cp": 4}, CAPACITY, "capacity"),
    deep_case(4, {"ep": 4, "zero": 1}, CAPACITY, "capacity"),
    deep_case(4, {"ep": 2, "pp": 2, "zero": 3}, CAPACITY, "capacity"),
    deep_case(8, {"ep": 4, "tp": 2, "cp": 2, "zero": 1, **SP}, CAPACITY, "capacity"),
    # experts balanced by a bias
    case(4, {"ep": 2, "tp": 2, "zero": 1, **SP}, BIAS, "bias"),
    deep_case(3, {"zero": 3}, BIAS, "bias", train={"global_batch": 6}),
    deep_case(4, {"tp": 2, "zero": 2}, BIAS, "bias"),
    deep_case(4, {"cp": 2, "pp": 2}, {**BIAS, "capacity_factor": 0.75}, "bias-capacity"),
    deep_case(4, {"ep": 2, "pp": 2, "pipeline_schedule": "zero_bubble"}, BIAS, "bias"),
    deep_case(4, {"ep": 2}, BIAS, "bias-full", recompute={"kind": "full"}),
    deep_case(2, {"tp": 2}, BIAS, "bias-lamb", optimizer={"kind": "lamb"}),
    deep_case(2, {"zero": 1}, BIAS, "bias-muon", optimizer={"kind": "muon"}),
    deep_case(2, {"ep": 2}, BIAS, "bias-user-code", **USER_CODE),
    # latent attention and prediction of further tokens, whose places in a sequence must not depend on the layout
    case(8, {"tp": 2, "pp": 2, "cp": 2, **SP}, DEEPSEEK),
    case(4, {"ep": 2, "zero": 3}, DEEPSEEK, "full", recompute={"kind": "full"}),
    case(4, {"tp": 2, "cp": 2}, DEEPSEEK, "documents", data={"document_mask": True, "seq_len": 64}),
    deep_case(2, {"tp": 2}, DEEPSEEK),
    deep_case(2, {"tp": 2, **SP}, {**DEEPSEEK, "q_lora_rank": None, "attention_bias": True}, "biases"),
    deep_case(4, {"tp": 4, **SP}, {**DEEPSEEK, "fuse_qkv": False, "tie_embeddings": True}, "tied"),
    deep_case(2, {"cp": 2}, DEEPSEEK),
    deep_case(4, {"cp": 4, "cp_method": "all_gather"}, DEEPSEEK),
    deep_case(2, {"pp": 2}, DEEPSEEK),
    deep_case(2, {"pp": 2, "pipeline_schedule": "zero_bubble"}, WITHOUT_MTP),
    deep_case(4, {"pp": 2, "vpp": 2, "tp": 2, **SP}, DEEPSEEK),
    deep_case(4, {"pp": 2, "zero": 3}, DEEPSEEK),
    deep_case(2, {"zero": 1}, DEEPSEEK, "muon", optimizer={"kind": "muon"}),
    deep_case(2, {"zero": 2}, DEEPSEEK),
    deep_case(4, {"ep": 2, "tp": 2, **SP}, DEEPSEEK, "selective", recompute=SELECTIVE),
    deep_case(2, {"tp": 2}, {**DEEPSEEK_V2, "expert_groups": 2, "top_k_groups": 1}, "groups"),
    deep_case(2, {"pp": 2}, DEEPSEEK_V2),
    # layers of several kinds, wherever a pipeline is cut
    # layers with a state instead of attention
    case(2, {"tp": 2, **SP}, NEXT),
    case(4, {"pp": 2, "zero": 3}, NEXT, "documents", data={"document_mask": True, "seq_len": 64}),
    deep_case(2, {"tp": 2}, {**NEXT, "fuse_qkv": False, "fuse_gate_up": False}, "unfused"),
    deep_case(2, {"pp": 2}, NEXT),
    deep_case(2, {"pp": 2, "pipeline_schedule": "zero_bubble"}, NEXT),
    deep_case(2, {"zero": 1}, NEXT),
    deep_case(3, {"zero": 3}, NEXT, "odd-shards", train={"global_batch": 6}),
    deep_case(4, {"tp": 2, "zero": 2, **SP}, NEXT, "full", recompute={"kind": "full"}),
    deep_case(2, {"tp": 2}, NEXT, "attention", recompute={"kind": "attention"}),
    deep_case(2, {"tp": 2, **SP}, NEXT, "selective", recompute={"kind": "selective", "modules": ["attention", "norm"]}),
    deep_case(8, {"tp": 2, "pp": 2, "zero": 1, **SP}, NEXT),
    deep_case(4, {"tp": 2, "zero": 1}, NEXT, "muon", optimizer={"kind": "muon"}),
    deep_case(4, {"tp": 2, "zero": 1, **SP}, NEXT, "bf16", precision={"kind": "bf16"}),
    deep_case(2, {"tp": 2}, NEXT, "lora", lora=LORA),
    deep_case(4, {"ep": 2, "tp": 2, "zero": 1, **SP}, NEXT_MOE, "experts"),
    deep_case(4, {"ep": 2, "pp": 2}, NEXT_MOE, "experts-full", recompute={"kind": "full"}),
    # a wrapper around linear layers
    case(4, {"tp": 4, "zero": 1, **SP}, scaled({**LLAMA, "kv_heads": 2}), "scaled"),
    deep_case(2, {"tp": 2}, scaled({**BERT, "fuse_qkv": False}), "scaled"),
    deep_case(4, {"cp": 2, "pp": 2}, scaled(LLAMA), "scaled"),
    deep_case(2, {"zero": 3}, scaled(GPT), "scaled", recompute={"kind": "full"}),
    deep_case(4, {"pp": 2, "vpp": 2, "tp": 2, **SP}, scaled(MIXED), "scaled", optimizer={"kind": "muon"}),
    # weights that are not trained, and some with a learning rate of their own
    deep_case(2, {"zero": 1}, frozen(LLAMA, lr_scale=2.0), "frozen", precision={"kind": "bf16"}),
    deep_case(2, {}, frozen(LLAMA), "frozen"),
    deep_case(2, {"zero": 1}, frozen(LLAMA, lr_scale=2.0), "frozen"),
    deep_case(3, {"zero": 2}, frozen(GPT), "frozen", train={"global_batch": 6}),
    deep_case(3, {"zero": 3}, frozen(GPT, lr_scale=2.0), "frozen", train={"global_batch": 6}),
    case(2, {"zero": 3}, frozen(LLAMA), "frozen-bf16", precision={"kind": "bf16"}),
    case(2, {"tp": 2, **SP}, frozen(LLAMA), "frozen"),
    deep_case(2, {"tp": 2}, frozen(BERT), "frozen"),
    deep_case(2, {"cp": 2}, frozen(LLAMA, pattern="embedding|norm|mlp"), "frozen"),
    deep_case(2, {"pp": 2}, frozen(LLAMA, lr_scale=2.0), "frozen"),
    case(2, {"pp": 2}, frozen(GPT, pattern="embedding|layers"), "frozen-first-stage"),
    deep_case(2, {"pp": 2, "pipeline_cuts": (0,)}, frozen(LLAMA, pattern="layers|output|norm"), "frozen-last-stage"),
    deep_case(2, {"pp": 2, "pipeline_schedule": "zero_bubble"}, frozen(LLAMA), "frozen"),
    deep_case(
        2, {"pp": 2, "pipeline_schedule": "zero_bubble"}, frozen(GPT, pattern="embedding|layers"), "frozen-first"
    ),
    deep_case(4, {"pp": 2, "vpp": 2, "pipeline_schedule": "zbv", "zero": 1}, frozen(GPT), "frozen"),
    deep_case(4, {"pp": 2, "zero": 3}, frozen(LLAMA, pattern="embedding|layers"), "frozen-first-stage"),
    deep_case(4, {"pp": 2, "zero": 1}, frozen(LLAMA, pattern="embedding|layers"), "frozen-first-stage"),
    deep_case(4, {"pp": 2, "tp": 2}, frozen(LLAMA, pattern="embedding|layers"), "frozen-first-stage"),
    deep_case(2, {"tp": 2, **SP}, frozen(LLAMA), "frozen-full", recompute={"kind": "full"}),
    deep_case(4, {"ep": 2, "zero": 1}, frozen(MOE), "frozen"),
    deep_case(4, {"ep": 2, "zero": 3}, frozen(MOE, pattern="experts"), "frozen-experts"),
    deep_case(4, {"tp": 2, "zero": 1}, frozen(LLAMA, lr_scale=3.0), "frozen-muon", optimizer={"kind": "muon"}),
    deep_case(4, {"tp": 2, "zero": 1}, frozen(LLAMA, lr_scale=3.0), "frozen-lamb", optimizer={"kind": "lamb"}),
    deep_case(4, {"pp": 2, "zero": 1}, frozen(LLAMA, lr_scale=3.0), "frozen-user-code", **USER_CODE),
    deep_case(4, {"tp": 2, "zero": 1}, frozen(BERT, lr_scale=3.0), "frozen-bf16_sr", precision={"kind": "bf16_sr"}),
    # adapters, whose dropout must not depend on the layout either
    case(4, {"tp": 4, "zero": 1, **SP}, LLAMA, "lora", lora=LORA),
    case(2, {"zero": 3}, LLAMA, "lora-bf16", lora=LORA, precision={"kind": "bf16"}),
    case(4, {"pp": 2, "cp": 2}, LLAMA, "lora", lora={**LORA, "train": ["head"]}),
    case(2, {"tp": 2}, GPT, "lora", lora={"dora": True, "dropout": 0.2, "train": ["embedding"]}),
    deep_case(2, {"tp": 2}, {**LLAMA, "fuse_qkv": False, "fuse_gate_up": False}, "lora-unfused", lora=LORA),
    deep_case(4, {"tp": 2, "zero": 2, **SP}, LLAMA, "lora", lora=LORA),
    deep_case(4, {"tp": 2, "zero": 3}, LLAMA, "lora-full", lora=LORA, recompute={"kind": "full"}),
    deep_case(
        4,
        *({"tp": 2, "cp": 2}, LLAMA, "lora-selective"),
        lora=LORA,
        recompute={"kind": "selective", "modules": ["core_attention", "mlp"]},
    ),
    deep_case(2, {"pp": 2, "vpp": 2}, LLAMA, "lora-muon", lora=LORA, optimizer={"kind": "muon"}),
    deep_case(2, {"pp": 2, "pipeline_schedule": "zero_bubble"}, LLAMA, "lora", lora=LORA),
    deep_case(2, {"ep": 2, "zero": 1}, MOE, "lora", lora=LORA),
    case(4, {"ep": 2, "tp": 2, "zero": 1, **SP}, MOE, "lora-experts", lora=EXPERTS),
    case(2, {"pp": 2}, CAPACITY, "lora-experts", lora={**EXPERTS, "targets": ["experts"]}),
    deep_case(2, {"ep": 2}, CAPACITY, "lora-experts", lora=EXPERTS),
    deep_case(2, {"ep": 2, "zero": 1}, MOE, "lora-experts", lora=EXPERTS),
    deep_case(2, {"tp": 2}, MOE, "lora-experts", lora=EXPERTS),
    deep_case(2, {"tp": 2, **SP}, MOE, "lora-experts-full", lora=EXPERTS, recompute={"kind": "full"}),
    deep_case(4, {"ep": 2, "zero": 3}, MOE, "lora-experts", lora=EXPERTS),
    deep_case(4, {"ep": 2, "tp": 2}, MOE, "lora-experts-muon", lora=EXPERTS, optimizer={"kind": "muon"}),
    deep_case(4, {"tp": 2, "zero": 1}, BERT, "lora-lamb", lora=LORA, optimizer={"kind": "lamb"}),
    deep_case(8, {"tp": 2, "pp": 2, "cp": 2, **SP}, {**LLAMA, "kv_heads": 1}, "lora-kv1", lora=LORA),
    # frozen matrices in 4 and 8 bits
    case(4, {"tp": 2, "zero": 1, **SP}, QLORA, "nf4", lora={**NF4, "dora": True}),
    case(2, {"tp": 2}, QLORA, "fp8", lora={"base": "fp8"}, precision={"kind": "fp8", "fp8_backward": "bf16"}),
    deep_case(2, {"tp": 2}, QLORA, "fp8-dora", lora={"base": "fp8", "dora": True}, precision={"kind": "bf16"}),
    deep_case(2, {"tp": 2}, {**QLORA, "kv_heads": 1}, "nf4-kv1", lora={**NF4, "targets": ["q", "down"]}),
    deep_case(2, {"pp": 2}, QLORA, "nf4-full", lora=NF4, recompute={"kind": "full"}),
    deep_case(2, {"cp": 2}, QLORA, "nf4", lora=NF4),
    deep_case(2, {"zero": 3}, QLORA, "nf4", lora=NF4),
    deep_case(4, {"tp": 2, "zero": 2, **SP}, QLORA, "nf4", lora={**NF4, "dropout": 0.2}),
    # noise of the embedding, which no layout changes
    deep_case(4, {"tp": 2, "cp": 2, **SP}, LLAMA, "noise", train=NOISE),
    case(4, {"pp": 2, "zero": 1}, LLAMA, "noise", train={**NOISE, "micro_batch": 2}),
    deep_case(2, {"tp": 2, **SP}, GPT, "noise", train=NOISE),
    deep_case(2, {"zero": 3}, LLAMA, "noise", train={**NOISE, "micro_batch": 2}),
    deep_case(4, {"pp": 2, "vpp": 2, "tp": 2, **SP}, LLAMA, "noise", train=NOISE),
    deep_case(2, {"tp": 2, **SP}, BERT, "noise", train=NOISE),
    # layers of several kinds
    deep_case(2, {"tp": 2, **SP}, MIXED),
    deep_case(2, {"cp": 2}, MIXED),
    case(2, {"pp": 2, "pipeline_cuts": (0,)}, MIXED, "dense-stage"),
    deep_case(2, {"pp": 2, "pipeline_cuts": (2,)}, MIXED),
    deep_case(4, {"pp": 2}, {**MIXED, "router_bias": True}, "bias"),
    deep_case(2, {"pp": 2, "vpp": 2}, MIXED),
    deep_case(2, {"zero": 1}, MIXED),
    deep_case(2, {"zero": 3}, MIXED),
    deep_case(4, {"ep": 2, "zero": 1}, MIXED),
    case(8, {"ep": 2, "pp": 2, "pipeline_cuts": (0,), "tp": 2, "zero": 3, **SP}, MIXED, "dense-stage"),
    deep_case(4, {"tp": 2, "zero": 1}, MIXED, "muon", optimizer={"kind": "muon"}),
    deep_case(4, {"cp": 2, "tp": 2}, MIXED, "full", recompute={"kind": "full"}),
    # routers and experts of other families
    case(8, {"ep": 2, "tp": 2, "pp": 2, "zero": 1, **SP}, SHARED, "shared"),
    deep_case(2, {"tp": 2, **SP}, SHARED, "shared"),
    deep_case(2, {"tp": 2}, SHARED, "shared"),
    deep_case(2, {"cp": 2}, SHARED, "shared"),
    deep_case(2, {"zero": 3}, SHARED, "shared"),
    deep_case(4, {"ep": 4, "zero": 3}, SHARED, "shared"),
    deep_case(4, {"ep": 2, "cp": 2}, {**SHARED, "capacity_factor": 0.75}, "shared-capacity"),
    deep_case(2, {"tp": 2, **SP}, SHARED, "shared-full", recompute={"kind": "full"}),
    deep_case(2, {"tp": 2, **SP}, SHARED, "shared-mlp", recompute={"kind": "selective", "modules": ["mlp"]}),
    deep_case(2, {"ep": 2}, SHARED, "shared-activation", recompute={"kind": "selective", "modules": ["activation"]}),
    deep_case(4, {"ep": 2, "tp": 2}, SHARED, "shared-muon", optimizer={"kind": "muon"}),
    deep_case(4, {"ep": 2, "tp": 2}, SHARED, "shared-lora", lora=EXPERTS),
    *(case(4, {"ep": 2, "tp": 2, "zero": 1, **SP}, model) for model in (GPT_OSS, OLMOE, QWEN2_MOE, LLAMA4)),
    *(deep_case(4, {"pp": 2, "cp": 2}, model) for model in (GPT_OSS, OLMOE, QWEN2_MOE, LLAMA4)),
    deep_case(4, {"tp": 4}, {**GPT_OSS, "kv_heads": 1}, "gpt-oss"),
    deep_case(4, {"ep": 2, "cp": 2, "zero": 3}, GPT_OSS, "gpt-oss"),
    deep_case(2, {"ep": 2}, {**GPT_OSS, "capacity_factor": 0.75}, "gpt-oss-capacity"),
    deep_case(2, {"tp": 2, **SP}, GPT_OSS, "gpt-oss-full", recompute={"kind": "full"}),
    deep_case(4, {"ep": 2, "tp": 2}, GPT_OSS, "gpt-oss-muon", optimizer={"kind": "muon"}),
    deep_case(4, {"ep": 2, "tp": 2}, GPT_OSS, "gpt-oss-lora", lora=EXPERTS),
    deep_case(2, {"ep": 2}, {**LLAMA4, "capacity_factor": 0.75}, "llama4-capacity"),
    deep_case(2, {"tp": 2, **SP}, LLAMA4, "llama4-full", recompute={"kind": "full"}),
    # families that share Llama's block
    *((case if model["family"] in NEW_BLOCKS else deep_case)(2, {"tp": 2}, model) for model in LLAMA_LIKE_MODELS),
    *(deep_case(4, {"tp": 2, "cp": 2, **SP}, model) for model in LLAMA_LIKE_MODELS),
    *(deep_case(4, {"pp": 2, "zero": 1}, model) for model in LLAMA_LIKE_MODELS),
    *(deep_case(4, {"tp": 4, "zero": 3, **SP}, model) for model in LLAMA_LIKE_MODELS),
    deep_case(2, {"tp": 2, **SP}, OPT),
    deep_case(4, {"pp": 2, "cp": 2}, OPT),
    deep_case(
        2, {"tp": 2, **SP}, PHI, "activation", recompute={"kind": "selective", "modules": ["activation", "norm"]}
    ),
    deep_case(2, {"tp": 2, **SP}, {**PHI, "fuse_qkv": False}, "unfused-full", recompute={"kind": "full"}),
    deep_case(
        2, {"tp": 2, **SP}, {**OPT, "activation": "relu2"}, "mlp", recompute={"kind": "selective", "modules": ["mlp"]}
    ),
]


def configure(layout: dict[str, Any], model: dict[str, Any], sections: dict[str, Any], size: Size = FAST) -> Config:
    model = {**model, "layers": PIPELINE_LAYERS if "pp" in layout else size.layers}
    base: dict[str, Any] = {
        "train": {"global_batch": size.global_batch, "micro_batch": 1, "steps": NIGHTLY.steps},
        # Adam divides a gradient by its own magnitude, so a gradient that is only rounding error would give an update
        # that is, too. With this eps the update is a smooth function of the gradient.
        "optimizer": {"lr": 1e-3, "eps": 1e-3, "max_grad_norm": 0.3},
        "data": {"max_predictions": 4},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    return configs.tiny_config(model, layout=layout, **merged)


References = dict[tuple[str, int], VerifyRecord]
"""Records of one rank by configuration and steps, shared by all layouts of the same training."""
JOB = "tests.distributed.planted_errors:record_with_error"


@pytest.fixture(scope="session")
def references() -> References:
    return {}


def run(
    pool: Pool, references: References, config: Config, ranks: int, steps: int, planted: str = ""
) -> tuple[VerifyRecord, VerifyRecord]:
    single = single_rank_config(config)
    key = single.model_dump_json(), steps
    if key not in references:
        references[key] = pool.run(JOB, (single, steps), 1)[0]
    return pool.run(JOB, (config, steps, planted), ranks)[0], references[key]


SIZES = [pytest.param(FAST, id="fast"), pytest.param(NIGHTLY, id="nightly", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("ranks", "layout", "model", "sections"), CASES)
def test_layout_equals_one_rank(
    pool: Pool,
    references: References,
    ranks: int,
    layout: dict[str, Any],
    model: dict[str, Any],
    sections: dict[str, Any],
    size: Size,
) -> None:
    if "experts" in model and "precision" in sections:
        size = FAST  # after a few steps, rounding to bf16 sends a token to another expert, whose gradient jumps
    if sections.get("lora", {}).get("base") == "fp8":
        size = FAST  # each rank scales its part of a matrix, and what that rounds differently grows with steps
    config = configure(layout, model, sections, size)
    if config.layout.pipeline_schedule != "1f1b" and not supports_zero_bubble():
        with pytest.raises(RankFailed, match="nearest: 1f1b"):
            run(pool, references, config, ranks, size.steps)
        return
    findings = compare_records(*run(pool, references, config, ranks, size.steps), config.precision.kind)
    assert all(finding.ok for finding in findings), "\n".join(str(finding) for finding in findings)


DECOMPOSED_ATTENTION_CASES = [
    case(2, {"cp": 2}, LLAMA, "selective", recompute={"kind": "selective", "modules": ["core_attention", "mlp"]}),
    case(2, {"cp": 2}, BERT),
    case(4, {"cp": 2, "tp": 2, **SP}, LLAMA, "documents", data={"document_mask": True, "seq_len": 64}),
    case(4, {"cp": 4}, GPT, "documents", data={"document_mask": True, "seq_len": 64}),
    case(1, {}, GPT, "documents", data={"document_mask": True, "seq_len": 64}),
]


@pytest.mark.parametrize(("ranks", "layout", "model", "sections"), DECOMPOSED_ATTENTION_CASES)
def test_decomposed_attention_equals_one_rank(
    pool: Pool,
    references: References,
    ranks: int,
    layout: dict[str, Any],
    model: dict[str, Any],
    sections: dict[str, Any],
) -> None:
    """Attention as on Trainium: keys and values are gathered, and a compiler sees plain operators only."""
    config = configure(layout, model, sections)
    records = run(pool, references, config, ranks, FAST.steps, "decomposed-attention")
    findings = compare_records(*records, config.precision.kind)
    assert all(finding.ok for finding in findings), "\n".join(str(finding) for finding in findings)


PLANTED: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # error, and a case that must reveal it
    "kv-gradients-not-summed": (4, {"tp": 4, **SP}, {**LLAMA, "kv_heads": 1}, {}),
    "norm-gradients-not-summed": (2, {"tp": 2, **SP}, LLAMA, {}),
    "tied-gradients-not-summed": (2, {"pp": 2}, {**LLAMA, "tie_embeddings": True}, {}),
    "data-parallel-gradients-not-summed": (2, {"zero": 1}, LLAMA, {}),
    "expert-gradients-not-summed": (4, {"ep": 2}, MOE, {}),
    "rows-out-of-order": (2, {"ep": 2}, MOE, {}),
    "mean-of-means": (4, {}, BERT, UNEVEN_COUNTS),
    "replicas-counted-in-norm": (4, {"tp": 4}, {**LLAMA, "kv_heads": 1}, {}),
    "dropout-depends-on-rank": (2, {"tp": 2, **SP}, GPT, {}),
    "ring-misses-last-token": (2, {"cp": 2}, LLAMA, {}),
    "softmax-over-local-vocabulary": (2, {"tp": 2}, LLAMA, {}),
    "init-depends-on-rank": (2, {"tp": 2}, LLAMA, {}),
    "batches-shifted": (2, {}, LLAMA, {}),
    "gathered-keys-out-of-order": (2, {"cp": 2}, LLAMA, {}),
}


FAST_PLANTED = ("norm-gradients-not-summed", "mean-of-means", "replicas-counted-in-norm", "rows-out-of-order")


@pytest.mark.parametrize(
    "planted",
    [*FAST_PLANTED, *(pytest.param(name, marks=pytest.mark.nightly) for name in PLANTED if name not in FAST_PLANTED)],
)
def test_planted_error_is_found(pool: Pool, references: References, planted: str) -> None:
    ranks, layout, model, sections = PLANTED[planted]
    config = configure(layout, model, sections)
    findings = compare_records(*run(pool, references, config, ranks, FAST.steps, planted), config.precision.kind)
    assert not all(finding.ok for finding in findings), planted
