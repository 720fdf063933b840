"""Groups of Megatron-LM flags that are interpreted together, one function per section of our configuration.

`flags` holds values by flag without dashes. Each function returns values by our dotted keys; flags that are copied
unchanged are not repeated here.
"""

import re
from math import ceil
from typing import Any

from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.yaml_io import format_value
from trainyard.importers.key_table import ConfigKeys, check_choice, check_family, gpt2_tokenizer, token_data
from trainyard.importers.known_models import GPT2_TOKENIZER, vocab_size

Flags = dict[str, Any]
REQUIRED_VALUES: dict[str, dict[str, object]] = {
    "llama": {"--normalization": "RMSNorm", "--position-embedding-type": "rope", "--disable-bias-linear": True},
    "gpt": {
        "--normalization": "LayerNorm",
        "--position-embedding-type": "learned_absolute",
        "--disable-bias-linear": False,
    },
}
"""Values of flags by model family."""
MOCK_VALIDATION_FRACTION = 0.05
DECAY_STYLES = ("cosine", "linear", "constant", "WSD")


def model_section(flags: Flags, warnings: list[str]) -> dict[str, Any]:
    """Return our model section, except for flags that are copied."""
    family = "llama" if flags.get("swiglu") else "gpt"
    rope = flags.get("use-rotary-position-embeddings") or flags.get("no-position-embedding")
    found: dict[str, object] = {
        "--normalization": flags.get("normalization", "LayerNorm"),
        "--position-embedding-type": "rope" if rope else flags.get("position-embedding-type", "learned_absolute"),
        "--disable-bias-linear": bool(flags.get("disable-bias-linear")),
    }
    check_family(family, f"{'with' if family == 'llama' else 'without'} --swiglu", found, REQUIRED_VALUES[family])
    hidden, heads = flags.get("hidden-size"), flags.get("num-attention-heads")
    files = [flags.get("vocab-file"), flags.get("tokenizer-model")]
    section: dict[str, Any] = {
        "family": family,
        "vocab": flags.get("vocab-size") or vocab_size(files, flags.get("tokenizer-type", GPT2_TOKENIZER)),
        "ffn": flags.get("ffn-hidden-size") or (4 * hidden if hidden else None),
        "max_positions": flags.get("max-position-embeddings") or _seq_len(flags),
        "norm_eps": flags.get("norm-epsilon", flags.get("layernorm-epsilon")),
        "tie_embeddings": not flags.get("untie-embeddings-and-output-weights"),
    }
    dropout = {name: flags.get(f"{name}-dropout", 0.1) for name in ("hidden", "attention")}
    head_dim = flags.get("kv-channels")
    kv_heads = flags.get("num-query-groups", 1) if flags.get("group-query-attention") else None
    if family == "llama":
        for name, value in dropout.items():
            if value:
                raise UserError(f"--{name}-dropout={value}: our Llama has no dropout; nearest: --{name}-dropout 0")
        section |= {
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "rope_theta": flags.get("rotary-base"),
            "rope_scaling": _rope_scaling(flags),
        } | _experts(flags, warnings)
    else:
        if flags.get("num-experts"):
            raise UserError(f"--num-experts={flags['num-experts']}: experts are SwiGLU; nearest: --swiglu")
        if kv_heads not in (None, heads):
            raise UserError(f"--num-query-groups={kv_heads}: GPT has one kv head per head; nearest: leave it out")
        if head_dim and hidden and heads and head_dim * heads != hidden:
            raise UserError(f"--kv-channels={head_dim}: the head size of GPT is hidden / heads; nearest: leave it out")
        # Megatron-LM's fused kernel uses the tanh approximation; without it the exact function is used.
        exact = flags.get("no-bias-gelu-fusion") and not flags.get("openai-gelu")
        section |= {
            "activation": "gelu" if exact else "gelu_tanh",
            "hidden_dropout": dropout["hidden"],
            "embedding_dropout": dropout["hidden"],
            "attention_dropout": dropout["attention"],
        }
    return {name: value for name, value in section.items() if value is not None}


def _experts(flags: Flags, warnings: list[str]) -> dict[str, Any]:
    """Return what makes a Llama a Mixtral."""
    if not (experts := flags.get("num-experts")):
        return {}
    top_k, coefficient = flags.get("moe-router-topk", 2), flags.get("moe-aux-loss-coeff", 0.0)
    balance = flags.get("moe-router-load-balancing-type", "aux_loss")
    check_choice("--moe-router-load-balancing-type", balance, ("aux_loss", "none"), "aux_loss")
    coefficient = coefficient if balance == "aux_loss" else 0.0
    section: dict[str, Any] = {
        "family": "mixtral",
        "experts": experts,
        "top_k": top_k,
        "normalize_top_k": not flags.get("moe-router-pre-softmax"),
        "ffn": flags.get("moe-ffn-hidden-size") or flags.get("ffn-hidden-size"),
        "balance_loss": coefficient * (flags.get("num-layers") or 1) / max(top_k, 1),
        "z_loss": flags.get("moe-z-loss-coeff", 0.0),
        "capacity_factor": flags.get("moe-expert-capacity-factor"),
    }
    if coefficient:
        warnings.append(
            f"--moe-aux-loss-coeff={coefficient:g}: model.balance_loss={section['balance_loss']:g}: Megatron-LM adds "
            "the losses of all layers and divides them by top-k; here they are averaged over layers"
        )
    if factor := section["capacity_factor"]:
        warnings.append(
            f"--moe-expert-capacity-factor={factor:g}: limits the tokens of each sample; Megatron-LM limits those of a "
            "micro batch"
        )
    return {name: value for name, value in section.items() if value is not None}


def _rope_scaling(flags: Flags) -> dict[str, Any] | None:
    factor = flags.get("rotary-seq-len-interpolation-factor")
    if flags.get("use-rope-scaling"):
        return {"kind": "llama3", "factor": flags.get("rope-scaling-factor", 8.0)}
    return {"kind": "linear", "factor": factor} if factor else None


def _seq_len(flags: Flags) -> int | None:
    return flags.get("seq-length") or flags.get("encoder-seq-length")


def train_keys(flags: Flags, ranks: int | None) -> ConfigKeys:
    """Batch sizes, steps and the optimizer."""
    micro_batch = flags.get("micro-batch-size") or 1
    global_batch = flags.get("global-batch-size") or micro_batch * _data_parallel_size(flags, ranks)
    if flags.get("optimizer", "adam") != "adam":
        raise UserError(f"--optimizer={flags['optimizer']}: not supported; nearest: adam")
    if "lr" not in flags:
        raise UserError("--lr: missing; needed: the peak learning rate")
    return {
        "train.micro_batch": micro_batch,
        "train.global_batch": global_batch,
        "train.steps": _steps(flags, "train", global_batch),
        "optimizer.kind": "adamw",  # the weight decay of Megatron-LM's adam is decoupled
    }


def _data_parallel_size(flags: Flags, ranks: int | None) -> int:
    size = ranks or 1
    for axis in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"):
        size //= max(flags.get(axis, 1), 1)
    return max(size, 1)


def _steps(flags: Flags, name: str, global_batch: int) -> int | None:
    """Return `--NAME-iters`, or the steps that `--NAME-samples` make."""
    steps, samples = flags.get(f"{name}-iters"), flags.get(f"{name}-samples")
    if name == "train" and not steps and not samples:
        raise UserError("--train-iters: missing; needed: the number of steps")
    return steps if steps else ceil(samples / max(global_batch, 1)) if samples else None


def schedule_keys(flags: Flags) -> ConfigKeys:
    style = flags.get("lr-decay-style", "linear")
    check_choice("--lr-decay-style", style, DECAY_STYLES, "cosine")
    global_batch = flags.get("global-batch-size") or 1
    decay_steps = _steps(flags, "lr-decay", global_batch)
    total_steps = decay_steps or _steps(flags, "train", global_batch) or 0
    warmup_steps, fraction = _steps(flags, "lr-warmup", global_batch), flags.get("lr-warmup-fraction")
    keys: ConfigKeys = {
        "schedule.kind": style.lower(),
        "schedule.warmup_steps": round(fraction * total_steps) if fraction else warmup_steps or 0,
    }
    decay_steps = flags.get("lr-wsd-decay-iters") if style == "WSD" else decay_steps
    return keys | ({"schedule.decay_steps": decay_steps} if decay_steps else {})


def precision_keys(flags: Flags, xla_bf16: bool, warnings: list[str]) -> ConfigKeys:
    fp8 = "hybrid" if flags.get("fp8-hybrid") else flags.get("fp8-format")
    if fp8 not in (None, "hybrid"):
        raise UserError(f"--fp8-format={format_value(fp8)}: our gradients are e5m2 or bf16; nearest: hybrid")
    if flags.get("fp16"):
        warnings.append("--fp16: imported as bf16, which has the range of fp32 and needs no loss scaling")
    if fp8 or flags.get("bf16") or flags.get("fp16"):
        reduce_dtype = {"precision.reduce_dtype": "bf16"} if flags.get("grad-reduce-in-bf16") else {}
        return {"precision.kind": "fp8" if fp8 else "bf16"} | reduce_dtype
    if xla_bf16:
        warnings.append("XLA_USE_BF16=1: imported as bf16 weights with stochastic rounding, its meaning on Trainium")
        fp32_grads = flags.get("accumulate-allreduce-grads-in-fp32")
        return {"precision.kind": "bf16_sr"} | ({"precision.grad_dtype": "fp32"} if fp32_grads else {})
    return {"precision.kind": "fp32"}


def layout_keys(flags: Flags, ranks: int | None) -> ConfigKeys:
    tp, pp = flags.get("tensor-model-parallel-size", 1), flags.get("pipeline-model-parallel-size", 1)
    keys: ConfigKeys = {
        "layout.sequence_parallel": bool(flags.get("sequence-parallel")) and tp != 1,
        "layout.zero": 1 if flags.get("use-distributed-optimizer") else 0,
    }
    stage_layers = flags.get("num-layers-per-virtual-pipeline-stage")
    if stage_layers:
        layers = flags.get("num-layers") or 0
        if min(stage_layers, pp) < 1 or layers % pp or layers // pp % stage_layers:
            flag = f"--num-layers-per-virtual-pipeline-stage={stage_layers}"
            raise UserError(f"{flag}: does not divide {counted(layers, 'layer')} over pp={pp}")
        keys["layout.vpp"] = layers // pp // stage_layers
    return keys | ({"layout.ranks": ranks} if ranks else {})


def recompute_keys(flags: Flags) -> ConfigKeys:
    granularity = flags.get("recompute-granularity")
    if granularity not in (None, "full", "selective"):
        flag = f"--recompute-granularity={format_value(granularity)}"
        raise UserError(f"{flag}: not full or selective; nearest: selective")
    method = flags.get("activations-checkpoint-method")
    if method not in (None, "uniform"):
        raise UserError(
            f"--activations-checkpoint-method={format_value(method)}: our recompute is the same for every block; "
            "nearest: uniform"
        )
    if granularity == "full" or method or flags.get("checkpoint-activations"):
        return {"recompute.kind": "full"}
    return {"recompute.kind": "attention" if granularity or flags.get("recompute-activations") else "none"}


def data_keys(flags: Flags) -> ConfigKeys:
    """Data, tokenizer and evaluation."""
    seq_len = _seq_len(flags)
    if seq_len is None:
        raise UserError("--seq-length: missing; needed: tokens per sample")
    split = ",".join(re.findall(r"[.\d]+", flags.get("split", "969,30,1")))  # it may be quoted twice
    cyclic = flags.get("dataloader-type", "single") != "single"
    resets = {f"--{name}": bool(flags.get(name)) for name in ("reset-position-ids", "reset-attention-mask")}
    keys: ConfigKeys = {"data.seq_len": seq_len}
    if flags.get("mock-data"):
        keys |= {"data.source": "synthetic", "data.validation_fraction": MOCK_VALIDATION_FRACTION}
    else:
        order = "megatron-2023" if "data-impl" in flags else "megatron"  # --data-impl went when the order changed
        keys |= token_data("--data-path", flags.get("data-path") or None, order, cyclic, split, resets)
        keys["data.mask_eod_loss"] = bool(flags.get("eod-mask-loss"))
    if tokenizer := flags.get("tokenizer-model"):
        keys["data.tokenizer"] = tokenizer
    keys |= gpt2_tokenizer(flags.get("vocab-file"), flags.get("merge-file"))
    every, batches = flags.get("eval-interval", 1000), flags.get("eval-iters", 100)
    held_out = split.split(",")[1:2] not in ([], ["0"], ["0.0"])
    if held_out and batches and every <= (_steps(flags, "train", flags.get("global-batch-size") or 1) or 0):
        keys |= {"evaluate.every": every, "evaluate.batches": batches}
    return keys


def checkpoint_and_log_keys(flags: Flags, warnings: list[str]) -> ConfigKeys:
    save, load = flags.get("save-xser") or flags.get("save"), flags.get("load-xser") or flags.get("load")
    keys: ConfigKeys = {
        "checkpoint.keep": 1 if flags.get("keep-last-checkpoint-only") else 0,
        "checkpoint.resume": "auto" if load and load == save else "none",
        "log.loggers": [
            name for name, flag in (("tensorboard", "tensorboard-dir"), ("wandb", "wandb-project")) if flags.get(flag)
        ],
    }
    if project := flags.get("wandb-project"):
        warnings.append(f"--wandb-project={format_value(project)}: set the environment variable WANDB_PROJECT instead")
    if save:
        keys["checkpoint.directory"] = save
    if load and load != save:
        keys["checkpoint.init_from"] = load
        if not flags.get("finetune"):
            warnings.append(
                f"--load={format_value(load)}: imports only the weights, not the optimizer state and step of a "
                "Megatron-LM checkpoint"
            )
    return keys
