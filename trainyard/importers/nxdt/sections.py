"""Sections of an NxDT file that need more than a renamed key, one function per section of our configuration.

`keys` holds NxDT's values by dotted key, without nulls. Each function returns values by our dotted keys and may append
warnings.
"""

import re
from pathlib import PurePath
from typing import Any

from trainyard.core.errors import UserError
from trainyard.core.yaml_io import format_value
from trainyard.importers.key_table import (
    ConfigKeys,
    check_choice,
    gpt2_tokenizer,
    positive_number,
    run_name,
    token_data,
)
from trainyard.importers.known_models import GPT2_TOKENIZER
from trainyard.importers.nxdt.alignment import chat_data, is_sft, objective

NxdtKeys = dict[str, Any]
STRATEGY, SCHEDULER = "distributed_strategy.", "model.optim.sched."
CALLBACK = "exp_manager.checkpoint_callback_params."
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
"""Our names for recompute.modules by NxDT's module class."""
PRECISION_KINDS = {
    "bf16SR": "bf16_sr",
    "fp32": "fp32",
    "autocast": "bf16",
    "mixed_precision": "bf16",
    "mixed_precisionSR": "bf16",
    "mixed_precision_SR": "bf16",
}
DEFAULT_SPLIT = "980,10,10"
"""The split in NxDT's examples and documentation."""
LONG_SEQ_LEN = 8192
"""Sequence length from which activations_checkpoint_recompute_mlp (of older NxDT files) has an effect."""
MINUTES = {"days": 1440.0, "hours": 60.0, "minutes": 1.0, "seconds": 1 / 60}


def layout_keys(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    axes = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context")
    tp, pp, vpp, cp = (keys.get(f"{STRATEGY}{axis}_parallel_size") or 1 for axis in axes)
    config_keys: ConfigKeys = {
        "layout.zero": 0 if keys.get(STRATEGY + "zero1") is False else 1,
        "layout.sequence_parallel": bool(keys.get(STRATEGY + "sequence_parallel")) and tp != 1,
    }
    if keys.get("trainer.devices") and keys.get("trainer.num_nodes"):
        config_keys["layout.ranks"] = keys["trainer.devices"] * keys["trainer.num_nodes"]
    if cp > 1:
        config_keys["layout.cp_method"] = "all_gather"
        warnings.append(f"context_parallel_size={cp}: keys and values are all-gathered; NxDT uses ring attention")
    cuts = keys.get("model.pipeline_cuts")
    if cuts:
        layers = [re.search(r"(\d{1,9})$", str(cut)) for cut in cuts]
        if not all(layers):
            raise UserError(f"model.pipeline_cuts={format_value(cuts)}: not names of layers, such as model.layers.18")
        config_keys["layout.pipeline_cuts"] = [int(layer[1]) for layer in layers if layer]
    num_layers = keys.get("model.num_layers") or pp * vpp
    if not cuts and pp * vpp > 1 and num_layers % (pp * vpp):
        warnings.append(
            f"model.num_layers={num_layers} on {pp * vpp} stages: NxDT assigns the remainder to the last stages, we to "
            "the middle ones; set model.pipeline_cuts to choose"
        )
    return config_keys


def precision_keys(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    kind = keys.get("precision.type", "")
    if kind == "manual":
        return _manual_precision(keys)
    check_choice("precision.type", keys.get("precision.type"), [*PRECISION_KINDS, "manual"])
    if PRECISION_KINDS[kind] == "bf16" and keys.get(STRATEGY + "zero1") is False:
        warnings.append(f"precision.type={kind}: NxDT has no fp32 master weights without zero1; we keep them")
    return {"precision.kind": PRECISION_KINDS[kind]}


def _manual_precision(keys: NxdtKeys) -> ConfigKeys:
    def is_on(name: str) -> bool:
        return str(keys.get(f"precision.{name}", "0")) == "1"

    if not (is_on("xla_use_bf16") or is_on("xla_downcast_bf16")):
        return {"precision.kind": "fp32"}
    config_keys: ConfigKeys = {"precision.grad_dtype": "fp32" if keys.get("precision.fp32_grad_acc") else "bf16"}
    if keys.get("precision.fp32_grads_cc"):
        config_keys["precision.reduce_dtype"] = "fp32"
    if keys.get("precision.master_weights"):
        return config_keys | {"precision.kind": "bf16"}
    if is_on("neuron_rt_stochastic_rounding_en"):
        return config_keys | {"precision.kind": "bf16_sr"}
    raise UserError(
        "precision.type=manual: bf16 weights rounded to nearest lose small updates and are not supported; "
        "nearest: master_weights True, or neuron_rt_stochastic_rounding_en '1'"
    )


def optimizer_keys(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    name, betas = keys.get("model.optim.name"), keys.get("model.optim.betas") or [0.9, 0.999]
    adam_without_decay = name == "adam" and keys.get("model.optim.weight_decay") == 0
    if name not in ("adamw", "adamw_fp32OptState") and not adam_without_decay:
        raise UserError(f"model.optim.name={format_value(name)}: not adamw or adamw_fp32OptState; nearest: adamw")
    if "model.optim.lr" not in keys:
        raise UserError("model.optim.lr: missing; needed: the peak learning rate")
    if len(betas) != 2 or not all(isinstance(beta, int | float) for beta in betas):
        raise UserError(f"model.optim.betas={format_value(betas)}: not two numbers; nearest: [0.9, 0.95]")
    return {"optimizer.kind": "adamw", "optimizer.beta1": betas[0], "optimizer.beta2": betas[1]}


def schedule_keys(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    name, steps = keys.get(SCHEDULER + "name"), keys.get("trainer.max_steps") or 0
    if name is None:
        return {"schedule.kind": "constant"}
    check_choice(f"{SCHEDULER}name", name, SCHEDULES, "CosineAnnealing")
    warmup_steps = keys.get(SCHEDULER + "warmup_steps", int(keys.get(SCHEDULER + "warmup_ratio", 0) * steps))
    config_keys: ConfigKeys = {"schedule.kind": SCHEDULES[name], "schedule.warmup_steps": warmup_steps}
    if name in ("CosineAnnealing", "WarmupAnnealing"):
        config_keys["schedule.min_lr"] = keys.get(SCHEDULER + "min_lr") or 0.0
    constant_steps = keys.get(SCHEDULER + "constant_steps") or 0
    if name == "CosineAnnealing" and constant_steps > 0:
        config_keys["schedule.decay_steps"] = max(steps - constant_steps, warmup_steps, 1)
        if steps - constant_steps <= warmup_steps:
            warnings.append(
                f"{SCHEDULER}constant_steps={constant_steps}: leaves none of {steps} steps for the decay: after the "
                "warm-up the learning rate is min_lr, as in NxDT"
            )
    return config_keys


def recompute_keys(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    granularity = keys.get("model.activations_checkpoint_granularity")
    if granularity == "full":
        return {"recompute.kind": "full"}
    if granularity is None:
        flash = keys.get("model.fusions.flash_attention") or keys.get("model.fusions.ring_attention")
        if keys["model_source"] != "hf" or flash:
            return {"recompute.kind": "none"}
        warnings.append(
            "activations_checkpoint_granularity=null: without flash attention NxDT still recomputes core attention"
        )
        return {"recompute.kind": "attention"}
    if granularity != "selective":
        name = "model.activations_checkpoint_granularity"
        raise UserError(f"{name}={granularity}: not selective, full or null; nearest: selective")
    classes = keys.get("model.activations_checkpoint_recompute")
    if classes is None:
        is_long = (keys.get("model.encoder_seq_length") or 0) >= LONG_SEQ_LEN
        with_mlp = keys.get("model.activations_checkpoint_recompute_mlp") and is_long
        classes = ["CoreAttention", "LlamaMLP"] if with_mlp else ["CoreAttention"]
    for name in classes:
        check_choice("model.activations_checkpoint_recompute", name, RECOMPUTE_MODULES)
    modules = list(dict.fromkeys(RECOMPUTE_MODULES[name] for name in classes))
    if modules == ["core_attention"] or not modules:
        return {"recompute.kind": "attention" if modules else "none"}
    return {"recompute.kind": "selective", "recompute.modules": modules}


def checkpoint_keys(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    keep, every = keys.get(CALLBACK + "save_top_k"), keys.get(CALLBACK + "every_n_train_steps") or 0
    saves = keep != 0 and keys.get("exp_manager.create_checkpoint_callback") is not False
    config_keys: ConfigKeys = {"checkpoint.every": every if saves else 0}
    if saves and (interval := keys.get(CALLBACK + "train_time_interval")):
        config_keys["checkpoint.every_minutes"] = _minutes(interval)
    if keep:
        config_keys["checkpoint.keep"] = max(keep, 0)  # NxDT's -1 keeps all, as our 0
    config_keys["checkpoint.resume"] = "auto" if keys.get("exp_manager.resume_if_exists") else "none"
    path = keys.get("exp_manager.resume_from_checkpoint")
    if path:
        config_keys["checkpoint.init_from"] = path
        if not keys.get("model.weight_init_only"):
            warnings.append(
                f"exp_manager.resume_from_checkpoint={format_value(path)}: loads only the weights; to resume with the "
                "optimizer state and the step: trainyard convert SRC DST --to native, then checkpoint.resume=DST"
            )
    return config_keys


def _minutes(interval: dict[str, Any]) -> float:
    if not all(unit in MINUTES and isinstance(count, int | float) for unit, count in interval.items()):
        raise UserError(f"{CALLBACK}train_time_interval={format_value(interval)}: not numbers of {', '.join(MINUTES)}")
    return sum(MINUTES[unit] * count for unit, count in interval.items())


def log_keys(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    choices = {name: keys.get(f"exp_manager.create_{name}_logger") for name in ("tensorboard", "wandb", "mlflow")}
    config_keys: ConfigKeys = {}
    if any(choice is not None for choice in choices.values()):
        config_keys["log.loggers"] = [name for name, choice in choices.items() if choice]
    run_directory = keys.get("exp_manager.explicit_log_dir") or keys.get("exp_manager.exp_log_dir")
    if run_directory:
        path = PurePath(run_directory)
        return config_keys | {"log.directory": str(path.parent), "log.name": run_name(path.name)}
    name = keys.get("exp_manager.name") or keys.get("name")
    parent = keys.get("exp_manager.exp_dir")
    config_keys |= {"log.name": run_name(name)} if name else {}
    return config_keys | ({"log.directory": parent} if parent else {})


def data_keys(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    """Return our keys of data and evaluate."""
    seq_len = keys.get("model.encoder_seq_length")
    if is_sft(keys) or objective(keys):
        data = chat_data(keys, warnings) | _tokenizer(keys)
        return data | _evaluation(keys, None, warnings)
    if seq_len is None or keys.get("data.seq_length", seq_len) != seq_len:
        raise UserError(
            f"model.encoder_seq_length={format_value(seq_len)}: required, and must equal "
            f"data.seq_length={format_value(keys.get('data.seq_length'))}"
        )
    if "data.data_prefix" in keys:
        data = _megatron_data(keys, warnings)
    elif path := keys.get("data.train_dir"):
        data = {"data.source": "arrow", "data.paths": [path]}
    else:
        raise UserError("data.train_dir: missing; needed: a packed directory, or data.data_prefix for .bin and .idx")
    return {"data.seq_len": seq_len, **data, **_evaluation(keys, data.get("data.split"), warnings)}


def _megatron_data(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    prefix = keys["data.data_prefix"]
    split: str | None = str(keys.get("data.splits_string") or DEFAULT_SPLIT).replace(" ", "").strip("[]()")
    if isinstance(prefix, dict):
        split = None
        if prefix.get("validation") or prefix.get("test"):
            warnings.append(
                "data.data_prefix: separate validation and test sets are not supported; no samples are held out"
            )
        prefix = prefix.get("train")
    loader = keys.get("data.dataloader_type") or "single"
    resets = {name: bool(keys.get(name)) for name in ("data.reset_position_ids", "data.reset_attention_mask")}
    blend = [prefix] if isinstance(prefix, str) else prefix
    data = token_data("data.data_prefix", blend, "megatron-2023", loader == "cyclic", split, resets)
    check_choice("data.dataloader_type", loader, ("single", "cyclic"), "single")
    return data | {"data.mask_eod_loss": bool(keys.get("data.eod_mask_loss")), **_tokenizer(keys)}


def _tokenizer(keys: NxdtKeys) -> ConfigKeys:
    kind = keys.get("data.tokenizer.type")
    if kind == GPT2_TOKENIZER:
        vocab_file, merges_file = keys.get("data.tokenizer.vocab_file"), keys.get("data.tokenizer.merge_file")
        return gpt2_tokenizer(vocab_file, merges_file)
    name = keys.get("data.tokenizer.model") or kind
    return {"data.tokenizer": name} if name else {}


def _evaluation(keys: NxdtKeys, split: str | None, warnings: list[str]) -> ConfigKeys:
    every, batches = keys.get("trainer.val_check_interval", 0), keys.get("trainer.limit_val_batches", 0)
    if not every or not batches or every > keys.get("trainer.max_steps", 0):
        return {"evaluate.every": 0}
    sets: ConfigKeys = {}
    if (path := keys.get("data.val_dir")) and "data.data_prefix" not in keys:
        sets = {"evaluate.sets": {"validation": [path]}}
    held_out = bool(sets or (split and positive_number((*split.split(","), "")[1])))
    if isinstance(every, float) or isinstance(batches, float) or not held_out:
        reason = "fractions of an epoch are not supported" if held_out else "no samples are held out"
        warnings.append(
            f"trainer.val_check_interval={every}, limit_val_batches={batches}: no evaluation, because {reason}; see "
            "data.validation_fraction, evaluate.every, evaluate.batches"
        )
        return {"evaluate.every": 0}
    return {"evaluate.every": every, "evaluate.batches": batches, **sets}
