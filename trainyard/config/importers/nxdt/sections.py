"""The sections of an NxDT file that take more than a new name: layout, precision, optimizer, schedule, recompute,
checkpoints, logs. Each function gives our dotted keys, and adds what deserves a warning."""

import re
from pathlib import PurePath
from typing import Any

from trainyard.config.importers.key_table import format_value, run_name
from trainyard.core.errors import UserError

NxdtKeys = dict[str, Any]
ConfigKeys = dict[str, Any]
STRATEGY_PREFIX, CALLBACK_PREFIX = "distributed_strategy.", "exp_manager.checkpoint_callback_params."
SCHEDULES = {
    "CosineAnnealing": "cosine",
    "LinearAnnealingWithWarmUp": "linear",
    "WarmupAnnealing": "linear",
    "WarmupPolicy": "constant",
    "WarmupHoldPolicy": "constant",
}
RECOMPUTE_MODULES = {
    "CoreAttention": "core_attention",
    "LlamaAttention": "attention",
    "ParallelAttention": "attention",
    "LlamaMLP": "mlp",
    "ParallelMLP": "mlp",
    "ActivationMultiplyMLP": "activation",
    "LlamaRMSNorm": "norm",
    "RMSNorm": "norm",
    "MixedFusedLayerNorm": "norm",
}
"""Their module classes, by our parts of a block."""
PRECISION_KINDS = {
    "bf16SR": "bf16_sr",
    "fp32": "fp32",
    "autocast": "bf16",
    "mixed_precision": "bf16",
    "mixed_precisionSR": "bf16",
    "mixed_precision_SR": "bf16",
}
LONG_SEQ_LEN = 8192
"""From here on, activations_checkpoint_recompute_mlp (of their older files) counts."""


def layout_keys(said: NxdtKeys, warn: list[str]) -> ConfigKeys:
    tp, cp = (
        said.get(STRATEGY_PREFIX + "tensor_model_parallel_size") or 1,
        said.get(STRATEGY_PREFIX + "context_parallel_size") or 1,
    )
    zero1 = said.get(STRATEGY_PREFIX + "zero1")
    out: ConfigKeys = {
        "layout.zero": 1 if zero1 or zero1 is None else 0,
        "layout.sequence_parallel": bool(said.get(STRATEGY_PREFIX + "sequence_parallel")) and tp != 1,
    }
    if said.get("trainer.devices") and said.get("trainer.num_nodes"):
        out["layout.ranks"] = said["trainer.devices"] * said["trainer.num_nodes"]
    if cp > 1:
        out["layout.cp_method"] = "all_gather"
        warn.append(f"context_parallel_size={cp}: keys and values are gathered; NxDT sends them round in a ring")
    cuts = said.get("model.pipeline_cuts")
    if cuts:
        numbers = [re.search(r"(\d{1,9})$", str(cut)) for cut in cuts]
        if not all(numbers):
            raise UserError(f"model.pipeline_cuts={format_value(cuts)}: not names of layers, such as model.layers.18")
        out["layout.pipeline_cuts"] = [int(number[1]) for number in numbers if number]
    stages = (said.get(STRATEGY_PREFIX + "pipeline_model_parallel_size") or 1) * (
        said.get(STRATEGY_PREFIX + "virtual_pipeline_model_parallel_size") or 1
    )
    layers = said.get("model.num_layers") or stages
    if not cuts and stages > 1 and layers % stages:
        warn.append(
            f"model.num_layers={layers} on {stages} stages: NxDT gives what is over to the last ones, here the middle "
            "ones get it; model.pipeline_cuts would say"
        )
    return out


def precision_keys(said: NxdtKeys, warn: list[str]) -> ConfigKeys:
    kind = said.get("precision.type")
    if kind == "manual":
        return _manual_precision(said)
    if kind not in PRECISION_KINDS:
        raise UserError(f"precision.type={format_value(kind)}: not one of {', '.join([*PRECISION_KINDS, 'manual'])}")
    if PRECISION_KINDS[kind] == "bf16" and said.get(STRATEGY_PREFIX + "zero1") is False:
        warn.append(f"precision.type={kind}: NxDT keeps no fp32 master weights without zero1; here they are kept")
    return {"precision.kind": PRECISION_KINDS[kind]}


def _manual_precision(said: NxdtKeys) -> ConfigKeys:
    def on(name: str) -> bool:
        return str(said.get(f"precision.{name}", "0")) == "1"

    gradients = "fp32" if said.get("precision.fp32_grad_acc") else "bf16"
    if not (on("xla_use_bf16") or on("xla_downcast_bf16")):
        return {"precision.kind": "fp32"}
    out: ConfigKeys = {"precision.grad_dtype": gradients}
    if said.get("precision.fp32_grads_cc"):
        out["precision.reduce_dtype"] = "fp32"
    if said.get("precision.master_weights"):
        return out | {"precision.kind": "bf16"}
    if on("neuron_rt_stochastic_rounding_en"):
        return out | {"precision.kind": "bf16_sr"}
    raise UserError(
        "precision.type=manual: bf16 weights that are rounded to nearest lose small updates, and are not there; "
        "nearest: master_weights True, or neuron_rt_stochastic_rounding_en '1'"
    )


def optimizer_keys(said: NxdtKeys, warn: list[str]) -> ConfigKeys:
    name, decay = said.get("model.optim.name"), said.get("model.optim.weight_decay")
    decay = 0.01 if decay is None else decay
    if name not in ("adamw", "adamw_fp32OptState") and not (name == "adam" and decay == 0):
        raise UserError(f"model.optim.name={format_value(name)}: not adamw or adamw_fp32OptState; nearest: adamw")
    if said.get("model.optim.lr") is None:
        raise UserError("model.optim.lr: missing; wanted: the peak learning rate")
    betas = said.get("model.optim.betas") or [0.9, 0.999]
    if len(betas) != 2 or not all(isinstance(each, int | float) for each in betas):
        raise UserError(f"model.optim.betas={format_value(betas)}: not two numbers; nearest: [0.9, 0.95]")
    eps = said.get("model.optim.eps")
    return {
        "optimizer.kind": "adamw",
        "optimizer.lr": said["model.optim.lr"],
        "optimizer.weight_decay": decay,
        "optimizer.beta1": betas[0],
        "optimizer.beta2": betas[1],
        "optimizer.eps": 1e-8 if eps is None else eps,
        "optimizer.max_grad_norm": said.get("trainer.gradient_clip_val") or 0.0,
    }


def schedule_keys(said: NxdtKeys, warn: list[str]) -> ConfigKeys:
    sched = "model.optim.sched."
    name, steps = said.get(sched + "name"), said.get("trainer.max_steps") or 0
    if name is None:
        return {"schedule.kind": "constant"}
    if name not in SCHEDULES:
        raise UserError(
            f"{sched}name={format_value(name)}: not one of {', '.join(SCHEDULES)}; nearest: CosineAnnealing"
        )
    ratio, warmup = said.get(sched + "warmup_ratio"), said.get(sched + "warmup_steps")
    warmup = int(ratio * steps) if ratio and warmup is None else warmup or 0
    out: ConfigKeys = {"schedule.kind": SCHEDULES[name], "schedule.warmup_steps": warmup}
    if name in ("CosineAnnealing", "WarmupAnnealing"):
        out["schedule.min_lr"] = said.get(sched + "min_lr") or 0.0
    constant = said.get(sched + "constant_steps") or 0
    if name == "CosineAnnealing" and constant > 0:
        out["schedule.decay_steps"] = max(steps - constant, warmup, 1)
        if steps - constant <= warmup:
            warn.append(
                f"{sched}constant_steps={constant}: of {steps} steps none is left to fall in: after the warm-up the "
                "rate is min_lr, there as here"
            )
    return out


def recompute_keys(said: NxdtKeys, warn: list[str]) -> ConfigKeys:
    granularity = said.get("model.activations_checkpoint_granularity")
    flash = said.get("model.fusions.flash_attention") or said.get("model.fusions.ring_attention")
    classes = said.get("model.activations_checkpoint_recompute")
    if granularity == "full":
        return {"recompute.kind": "full"}
    if granularity is None:
        anyway = said["model_source"] == "hf" and not flash
        if anyway:
            warn.append("activations_checkpoint_granularity=null: NxDT recomputes core attention anyway without flash")
        return {"recompute.kind": "attention" if anyway else "none"}
    if granularity != "selective":
        raise UserError(
            f"model.activations_checkpoint_granularity={granularity}: not selective, full or null; nearest: selective"
        )
    if classes is None:
        long = (said.get("model.encoder_seq_length") or 0) >= LONG_SEQ_LEN
        both = said.get("model.activations_checkpoint_recompute_mlp") and long
        classes = ["CoreAttention", "LlamaMLP"] if both else ["CoreAttention"]
    for each in classes:
        if not isinstance(each, str) or each not in RECOMPUTE_MODULES:
            raise UserError(
                f"model.activations_checkpoint_recompute={format_value(each)}: not one of {', '.join(RECOMPUTE_MODULES)}"
            )
    names = list(dict.fromkeys(RECOMPUTE_MODULES[each] for each in classes))
    if names == ["core_attention"] or not names:
        return {"recompute.kind": "attention" if names else "none"}
    return {"recompute.kind": "selective", "recompute.modules": names}


def checkpoint_keys(said: NxdtKeys, warn: list[str]) -> ConfigKeys:
    keep, every = said.get(CALLBACK_PREFIX + "save_top_k"), said.get(CALLBACK_PREFIX + "every_n_train_steps") or 0
    made = said.get("exp_manager.create_checkpoint_callback")
    saves = keep != 0 and (made or made is None)
    out: ConfigKeys = {"checkpoint.every": every if saves else 0}
    if saves and (span := said.get(CALLBACK_PREFIX + "train_time_interval")):
        out["checkpoint.every_minutes"] = _minutes(span)
    if keep:
        out["checkpoint.keep"] = max(keep, 0)  # -1: all, for which ours is 0
    out["checkpoint.resume"] = "auto" if said.get("exp_manager.resume_if_exists") else "none"
    path = said.get("exp_manager.resume_from_checkpoint")
    if path:
        out["checkpoint.init_from"] = path
        if not said.get("model.weight_init_only"):
            warn.append(
                f"exp_manager.resume_from_checkpoint={format_value(path)}: its weights are taken; for the optimizer's state "
                "and the step too: trainyard convert SRC DST --to native, then checkpoint.resume=DST"
            )
    return out


def _minutes(span: dict[str, Any]) -> float:
    units = {"days": 1440.0, "hours": 60.0, "minutes": 1.0, "seconds": 1 / 60}
    if not all(unit in units and isinstance(count, int | float) for unit, count in span.items()):
        raise UserError(f"{CALLBACK_PREFIX}train_time_interval={format_value(span)}: not numbers of {', '.join(units)}")
    return sum(units[unit] * count for unit, count in span.items())


def log_keys(said: NxdtKeys) -> ConfigKeys:
    whole = said.get("exp_manager.explicit_log_dir") or said.get("exp_manager.exp_log_dir")
    if whole:
        path = PurePath(whole)
        return {"log.directory": str(path.parent), "log.name": run_name(path.name)}
    name = said.get("exp_manager.name") or said.get("name")
    parent = said.get("exp_manager.exp_dir")
    return ({"log.name": run_name(name)} if name else {}) | ({"log.directory": parent} if parent else {})
