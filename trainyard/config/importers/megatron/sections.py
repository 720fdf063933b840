"""What sets of Megatron-LM's flags mean together: the model, the schedule, precision, layout, data, what is kept.

`said` has the flags without dashes; each function gives our dotted keys.
"""

from math import ceil
from typing import Any

from trainyard.config.importers.key_table import format_value
from trainyard.config.importers.known_models import GPT2_VOCAB, vocab_size_from_file
from trainyard.config.importers.nxdt.data import parse_blend
from trainyard.core.errors import UserError

Flags = dict[str, Any]
ConfigKeys = dict[str, Any]
FAMILY_FLAGS: dict[str, dict[str, object]] = {
    "llama": {"--normalization": "RMSNorm", "--position-embedding-type": "rope", "--disable-bias-linear": True},
    "gpt": {
        "--normalization": "LayerNorm",
        "--position-embedding-type": "learned_absolute",
        "--disable-bias-linear": False,
    },
}
DECAY_STYLES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
GPT2_TOKENIZER = "GPT2BPETokenizer"


def model_section(said: Flags, warn: list[str]) -> dict[str, Any]:
    family = "llama" if said.get("swiglu") else "gpt"
    rope = said.get("use-rotary-position-embeddings") or said.get("no-position-embedding")
    found: dict[str, object] = {
        "--normalization": said.get("normalization", "LayerNorm"),
        "--position-embedding-type": "rope" if rope else said.get("position-embedding-type", "learned_absolute"),
        "--disable-bias-linear": bool(said.get("disable-bias-linear")),
    }
    for name, wanted in FAMILY_FLAGS[family].items():
        if found[name] != wanted:
            raise UserError(
                f"{name}={format_value(found[name])}: {'with' if family == 'llama' else 'without'} --swiglu only "
                f"{format_value(wanted)} is there ({family}); nearest: {format_value(wanted)}"
            )
    hidden, heads = said.get("hidden-size"), said.get("num-attention-heads")
    out: dict[str, Any] = {
        "family": family,
        "vocab": _vocab_size(said),
        "hidden": hidden,
        "layers": said.get("num-layers"),
        "heads": heads,
        "ffn": said.get("ffn-hidden-size") or (4 * hidden if hidden else None),
        "max_positions": said.get("max-position-embeddings") or _seq_len(said),
        "init_std": said.get("init-method-std"),
        "norm_eps": said.get("norm-epsilon", said.get("layernorm-epsilon")),
        "tie_embeddings": not said.get("untie-embeddings-and-output-weights"),
    }
    dropout = {name: said.get(f"{name}-dropout", 0.1) for name in ("hidden", "attention")}
    wide = said.get("kv-channels")
    groups = said.get("num-query-groups", 1) if said.get("group-query-attention") else None
    if family == "llama":
        if any(dropout.values()):
            name = next(name for name, value in dropout.items() if value)
            raise UserError(f"--{name}-dropout={dropout[name]}: Llama has no dropout here; nearest: --{name}-dropout 0")
        out |= {
            "kv_heads": groups,
            "head_dim": wide,
            "rope_theta": said.get("rotary-base"),
            "rope_scaling": _rope_scaling(said),
        }
    else:
        if groups not in (None, heads):
            raise UserError(f"--num-query-groups={groups}: GPT has a kv head for each head; nearest: leave it out")
        if wide and hidden and heads and wide * heads != hidden:
            raise UserError(f"--kv-channels={wide}: GPT's heads are hidden / heads wide; nearest: leave it out")
        # Without the fused kernel, which is the tanh approximation, the exact function is used.
        exact = said.get("no-bias-gelu-fusion") and not said.get("openai-gelu")
        out |= {
            "activation": "gelu" if exact else "gelu_tanh",
            "hidden_dropout": dropout["hidden"],
            "embedding_dropout": dropout["hidden"],
            "attention_dropout": dropout["attention"],
        }
    return {name: value for name, value in out.items() if value is not None}


def _rope_scaling(said: Flags) -> dict[str, Any] | None:
    factor = said.get("rotary-seq-len-interpolation-factor")
    if said.get("use-rope-scaling"):
        return {"kind": "llama3", "factor": said.get("rope-scaling-factor", 8.0)}
    return {"kind": "linear", "factor": factor} if factor else None


def _vocab_size(said: Flags) -> int | None:
    if said.get("vocab-size"):
        return int(said["vocab-size"])
    for name in ("vocab-file", "tokenizer-model"):
        if said.get(name) and (found := vocab_size_from_file(said[name])):
            return found
    return GPT2_VOCAB if said.get("tokenizer-type", GPT2_TOKENIZER) == GPT2_TOKENIZER else None


def _seq_len(said: Flags) -> int | None:
    sequence: int | None = said.get("seq-length") or said.get("encoder-seq-length")
    return sequence


def train_keys(said: Flags, ranks: int | None) -> ConfigKeys:
    """Batch sizes, steps, and the optimizer."""
    micro = said.get("micro-batch-size") or 1
    batch = said.get("global-batch-size") or micro * _data_parallel_size(said, ranks)
    if said.get("optimizer", "adam") != "adam":
        raise UserError(f"--optimizer={said['optimizer']}: not there; nearest: adam")
    if said.get("lr") is None:
        raise UserError("--lr: missing; wanted: the peak learning rate")
    return {
        "train.micro_batch": micro,
        "train.global_batch": batch,
        "train.steps": _steps(said, "train", batch),
        "train.seed": said.get("seed", 1234),
        "optimizer.kind": "adamw",  # Megatron-LM's adam decays apart from the gradient
        "optimizer.lr": said["lr"],
        "optimizer.weight_decay": said.get("weight-decay", 0.01),
        "optimizer.max_grad_norm": said.get("clip-grad", 1.0),
        "optimizer.beta1": said.get("adam-beta1", 0.9),
        "optimizer.beta2": said.get("adam-beta2", 0.999),
        "optimizer.eps": said.get("adam-eps", 1e-8),
    }


def _data_parallel_size(said: Flags, ranks: int | None) -> int:
    axes = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    size = 1
    for axis in axes:
        size *= max(said.get(axis, 1), 1)
    return max((ranks or 1) // size, 1)


def _steps(said: Flags, what: str, batch: int) -> int | None:
    """`--WHAT-iters`, or as many as `--WHAT-samples` make."""
    steps, samples = said.get(f"{what}-iters"), said.get(f"{what}-samples")
    if what == "train" and not steps and not samples:
        raise UserError("--train-iters: missing; wanted: how many steps")
    return steps if steps else ceil(samples / max(batch, 1)) if samples else None


def schedule_keys(said: Flags) -> ConfigKeys:
    style = said.get("lr-decay-style", "linear")
    if style not in DECAY_STYLES:
        raise UserError(
            f"--lr-decay-style={format_value(style)}: not one of {', '.join(DECAY_STYLES)}; nearest: cosine"
        )
    batch = said.get("global-batch-size") or 1
    decay = _steps(said, "lr-decay", batch)
    whole = decay or _steps(said, "train", batch) or 0
    warmup, fraction = _steps(said, "lr-warmup", batch), said.get("lr-warmup-fraction")
    out: ConfigKeys = {
        "schedule.kind": DECAY_STYLES[style],
        "schedule.warmup_steps": round(fraction * whole) if fraction else warmup or 0,
        "schedule.min_lr": said.get("min-lr", 0.0),
    }
    decay = said.get("lr-wsd-decay-iters") if style == "WSD" else decay
    return out | ({"schedule.decay_steps": decay} if decay else {})


def precision_keys(said: Flags, environment: bool, warn: list[str]) -> ConfigKeys:
    fp8 = "hybrid" if said.get("fp8-hybrid") else said.get("fp8-format")
    if fp8 not in (None, "hybrid"):
        raise UserError(f"--fp8-format={format_value(fp8)}: gradients are e5m2 or bf16 here; nearest: hybrid")
    if fp8:
        return {"precision.kind": "fp8"}
    if said.get("bf16"):
        return {"precision.kind": "bf16"} | (
            {"precision.reduce_dtype": "bf16"} if said.get("grad-reduce-in-bf16") else {}
        )
    if environment:
        warn.append("XLA_USE_BF16=1: bf16 weights with stochastic rounding, as it means on Trainium")
        gradients = {"precision.grad_dtype": "fp32"} if said.get("accumulate-allreduce-grads-in-fp32") else {}
        return {"precision.kind": "bf16_sr", **gradients}
    return {"precision.kind": "fp32"}


def layout_keys(said: Flags, ranks: int | None) -> ConfigKeys:
    tp, pp = said.get("tensor-model-parallel-size", 1), said.get("pipeline-model-parallel-size", 1)
    out: ConfigKeys = {
        "layout.tp": tp,
        "layout.pp": pp,
        "layout.cp": said.get("context-parallel-size", 1),
        "layout.sequence_parallel": bool(said.get("sequence-parallel")) and tp != 1,
        "layout.zero": 1 if said.get("use-distributed-optimizer") else 0,
    }
    each = said.get("num-layers-per-virtual-pipeline-stage")
    if each:
        layers = said.get("num-layers") or 0
        if min(each, pp) < 1 or layers % pp or layers // pp % each:
            raise UserError(
                f"--num-layers-per-virtual-pipeline-stage={each}: does not divide {layers} layers on {pp} stages"
            )
        out["layout.vpp"] = layers // pp // each
    return out | ({"layout.ranks": ranks} if ranks else {})


def recompute_keys(said: Flags) -> ConfigKeys:
    kind = said.get("recompute-granularity")
    if kind not in (None, "full", "selective"):
        raise UserError(f"--recompute-granularity={format_value(kind)}: not full or selective; nearest: selective")
    method = said.get("activations-checkpoint-method")
    if method not in (None, "uniform"):
        raise UserError(
            f"--activations-checkpoint-method={format_value(method)}: every block is alike here; nearest: uniform"
        )
    if kind == "full" or method or said.get("checkpoint-activations"):
        return {"recompute.kind": "full"}
    return {"recompute.kind": "attention" if kind or said.get("recompute-activations") else "none"}


def data_keys(said: Flags) -> ConfigKeys:
    """Data, tokenizer and evaluation."""
    sequence = _seq_len(said)
    if sequence is None:
        raise UserError("--seq-length: missing; wanted: tokens of a sample")
    resets = [bool(said.get(f"reset-{name}")) for name in ("position-ids", "attention-mask")]
    if any(resets) and not all(resets):
        raise UserError(
            "--reset-position-ids, --reset-attention-mask: only both together (data.document_mask); nearest: both"
        )
    split = said.get("split", "969,30,1").replace(" ", "")
    paths, weights = parse_blend(said.get("data-path") or None, "--data-path")
    cyclic = said.get("dataloader-type", "single") != "single"
    out: ConfigKeys = {
        "data.source": "tokens",
        "data.seq_len": sequence,
        "data.paths": paths,
        "data.weights": weights,
        "data.order": "shuffled" if cyclic or (len(paths) > 1 and not weights) else "megatron",
        "data.split": split,
        "data.document_mask": all(resets),
        "data.mask_eod_loss": bool(said.get("eod-mask-loss")),
    }
    words, merges, named = said.get("vocab-file"), said.get("merge-file"), said.get("tokenizer-model")
    if words and merges:
        out |= {"data.tokenizer": "gpt2", "data.vocab_file": words, "data.merges_file": merges}
    elif named:
        out["data.tokenizer"] = named
    every, batches = said.get("eval-interval", 1000), said.get("eval-iters", 100)
    held_out = split.split(",")[1:2] not in ([], ["0"], ["0.0"])
    if held_out and batches and every <= (_steps(said, "train", said.get("global-batch-size") or 1) or 0):
        out |= {"evaluate.every": every, "evaluate.batches": batches}
    return out


def checkpoint_and_log_keys(said: Flags, warn: list[str]) -> ConfigKeys:
    """Checkpoints and logs."""
    save, load = said.get("save-xser") or said.get("save"), said.get("load-xser") or said.get("load")
    out: ConfigKeys = {
        "checkpoint.every": said.get("save-interval", 0),
        "checkpoint.keep": 1 if said.get("keep-last-checkpoint-only") else 0,
        "checkpoint.resume": "auto" if load and load == save else "none",
        "log.every": said.get("log-interval", 100),
        "log.tensorboard": bool(said.get("tensorboard-dir")),
    }
    if save:
        out["checkpoint.directory"] = save
    if load and load != save:
        out["checkpoint.init_from"] = load
        if not said.get("finetune"):
            warn.append(
                f"--load={format_value(load)}: its weights are taken; the optimizer's state and the step of Megatron-LM's "
                "checkpoints are not"
            )
    return out
