"""What sets of Megatron-LM's flags mean together: the model, the schedule, precision, layout, data, what is kept.

`said` has the flags without dashes; each function gives our dotted keys.
"""

from math import ceil
from typing import Any

from trainyard.config.importers.key_table import plain
from trainyard.config.importers.known_models import GPT2_VOCAB, vocab_of
from trainyard.config.importers.nxdt.data import blend
from trainyard.core.errors import UserError

Said = dict[str, Any]
Ours = dict[str, Any]
NEEDED: dict[str, dict[str, object]] = {
    "llama": {"--normalization": "RMSNorm", "--position-embedding-type": "rope", "--disable-bias-linear": True},
    "gpt": {
        "--normalization": "LayerNorm",
        "--position-embedding-type": "learned_absolute",
        "--disable-bias-linear": False,
    },
}
STYLES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
GPT2 = "GPT2BPETokenizer"


def model(said: Said, warn: list[str]) -> dict[str, Any]:
    family = "llama" if said.get("swiglu") else "gpt"
    rope = said.get("use-rotary-position-embeddings") or said.get("no-position-embedding")
    found: dict[str, object] = {
        "--normalization": said.get("normalization", "LayerNorm"),
        "--position-embedding-type": "rope" if rope else said.get("position-embedding-type", "learned_absolute"),
        "--disable-bias-linear": bool(said.get("disable-bias-linear")),
    }
    for name, wanted in NEEDED[family].items():
        if found[name] != wanted:
            raise UserError(
                f"{name}={plain(found[name])}: {'with' if family == 'llama' else 'without'} --swiglu only "
                f"{plain(wanted)} is there ({family}); nearest: {plain(wanted)}"
            )
    hidden, heads = said.get("hidden-size"), said.get("num-attention-heads")
    out: dict[str, Any] = {
        "family": family,
        "vocab": _vocab(said),
        "hidden": hidden,
        "layers": said.get("num-layers"),
        "heads": heads,
        "ffn": said.get("ffn-hidden-size") or (4 * hidden if hidden else None),
        "max_positions": said.get("max-position-embeddings") or _sequence(said),
        "init_std": said.get("init-method-std"),
        "norm_eps": said.get("norm-epsilon", said.get("layernorm-epsilon")),
        "tied": not said.get("untie-embeddings-and-output-weights"),
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
            "rope_scaling": _rope(said),
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


def _rope(said: Said) -> dict[str, Any] | None:
    factor = said.get("rotary-seq-len-interpolation-factor")
    if said.get("use-rope-scaling"):
        return {"kind": "llama3", "factor": said.get("rope-scaling-factor", 8.0)}
    return {"kind": "linear", "factor": factor} if factor else None


def _vocab(said: Said) -> int | None:
    if said.get("vocab-size"):
        return int(said["vocab-size"])
    for name in ("vocab-file", "tokenizer-model"):
        if said.get(name) and (found := vocab_of(said[name])):
            return found
    return GPT2_VOCAB if said.get("tokenizer-type", GPT2) == GPT2 else None


def _sequence(said: Said) -> int | None:
    sequence: int | None = said.get("seq-length") or said.get("encoder-seq-length")
    return sequence


def train(said: Said, ranks: int | None) -> Ours:
    """Batch sizes, steps, and the optimizer."""
    micro = said.get("micro-batch-size") or 1
    batch = said.get("global-batch-size") or micro * _data_parallel(said, ranks)
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
        "optimizer.clip": said.get("clip-grad", 1.0),
        "optimizer.beta1": said.get("adam-beta1", 0.9),
        "optimizer.beta2": said.get("adam-beta2", 0.999),
        "optimizer.eps": said.get("adam-eps", 1e-8),
    }


def _data_parallel(said: Said, ranks: int | None) -> int:
    axes = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    size = 1
    for axis in axes:
        size *= max(said.get(axis, 1), 1)
    return max((ranks or 1) // size, 1)


def _steps(said: Said, what: str, batch: int) -> int | None:
    """`--WHAT-iters`, or as many as `--WHAT-samples` make."""
    steps, samples = said.get(f"{what}-iters"), said.get(f"{what}-samples")
    if what == "train" and not steps and not samples:
        raise UserError("--train-iters: missing; wanted: how many steps")
    return steps if steps else ceil(samples / max(batch, 1)) if samples else None


def schedule(said: Said) -> Ours:
    style = said.get("lr-decay-style", "linear")
    if style not in STYLES:
        raise UserError(f"--lr-decay-style={plain(style)}: not one of {', '.join(STYLES)}; nearest: cosine")
    batch = said.get("global-batch-size") or 1
    decay = _steps(said, "lr-decay", batch)
    whole = decay or _steps(said, "train", batch) or 0
    warmup, fraction = _steps(said, "lr-warmup", batch), said.get("lr-warmup-fraction")
    out: Ours = {
        "schedule.kind": STYLES[style],
        "schedule.warmup": round(fraction * whole) if fraction else warmup or 0,
        "schedule.floor": said.get("min-lr", 0.0),
    }
    decay = said.get("lr-wsd-decay-iters") if style == "WSD" else decay
    return out | ({"schedule.decay_steps": decay} if decay else {})


def precision(said: Said, environment: bool, warn: list[str]) -> Ours:
    fp8 = "hybrid" if said.get("fp8-hybrid") else said.get("fp8-format")
    if fp8 not in (None, "hybrid"):
        raise UserError(f"--fp8-format={plain(fp8)}: gradients are e5m2 or bf16 here; nearest: hybrid")
    if fp8:
        return {"precision.kind": "fp8"}
    if said.get("bf16"):
        return {"precision.kind": "bf16"} | ({"precision.reduce": "bf16"} if said.get("grad-reduce-in-bf16") else {})
    if environment:
        warn.append("XLA_USE_BF16=1: bf16 weights with stochastic rounding, as it means on Trainium")
        gradients = {"precision.gradients": "fp32"} if said.get("accumulate-allreduce-grads-in-fp32") else {}
        return {"precision.kind": "bf16_sr", **gradients}
    return {"precision.kind": "fp32"}


def layout(said: Said, ranks: int | None) -> Ours:
    tp, pp = said.get("tensor-model-parallel-size", 1), said.get("pipeline-model-parallel-size", 1)
    out: Ours = {
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


def recompute(said: Said) -> Ours:
    kind = said.get("recompute-granularity")
    if kind not in (None, "full", "selective"):
        raise UserError(f"--recompute-granularity={plain(kind)}: not full or selective; nearest: selective")
    method = said.get("activations-checkpoint-method")
    if method not in (None, "uniform"):
        raise UserError(f"--activations-checkpoint-method={plain(method)}: every block is alike here; nearest: uniform")
    if kind == "full" or method or said.get("checkpoint-activations"):
        return {"recompute.kind": "full"}
    return {"recompute.kind": "attention" if kind or said.get("recompute-activations") else "none"}


def data(said: Said) -> Ours:
    """Data, tokenizer and evaluation."""
    sequence = _sequence(said)
    if sequence is None:
        raise UserError("--seq-length: missing; wanted: tokens of a sample")
    resets = [bool(said.get(f"reset-{name}")) for name in ("position-ids", "attention-mask")]
    if any(resets) and not all(resets):
        raise UserError(
            "--reset-position-ids, --reset-attention-mask: only both together (data.separate); nearest: both"
        )
    split = said.get("split", "969,30,1").replace(" ", "")
    paths, weights = blend(said.get("data-path") or None, "--data-path")
    cyclic = said.get("dataloader-type", "single") != "single"
    out: Ours = {
        "data.source": "tokens",
        "data.sequence": sequence,
        "data.paths": paths,
        "data.weights": weights,
        "data.order": "shuffled" if cyclic or (len(paths) > 1 and not weights) else "megatron",
        "data.split": split,
        "data.separate": all(resets),
        "data.mask_ends": bool(said.get("eod-mask-loss")),
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


def keeping(said: Said, warn: list[str]) -> Ours:
    """Checkpoints and logs."""
    save, load = said.get("save-xser") or said.get("save"), said.get("load-xser") or said.get("load")
    out: Ours = {
        "checkpoint.every": said.get("save-interval", 0),
        "checkpoint.keep": 1 if said.get("keep-last-checkpoint-only") else 0,
        "checkpoint.resume": "auto" if load and load == save else "none",
        "log.every": said.get("log-interval", 100),
        "log.tensorboard": bool(said.get("tensorboard-dir")),
    }
    if save:
        out["checkpoint.directory"] = save
    if load and load != save:
        out["checkpoint.start"] = load
        if not said.get("finetune"):
            warn.append(
                f"--load={plain(load)}: its weights are taken; the optimizer's state and the step of Megatron-LM's "
                "checkpoints are not"
            )
    return out
