"""adapter_config.json: the options of a LoRA adapter in PEFT's words, and what they are called here.

PEFT has dozens of options. Those that change what an adapter computes are read, or refused if they have another value
than PEFT's default; the rest only matters while PEFT trains.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from trainyard.core.errors import UserError, one_line
from trainyard.families.hf_config import EMPTY_VALUES
from trainyard.families.linear_wrappers.lora import LoraKeys

CONFIG_FILE = "adapter_config.json"
PEFT_VERSION = "0.21.2"
"""The version of PEFT whose options these are, and which written files name."""
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(
        re.findall(
            r"\w+",
            """alora_invocation_tokens arrow_config auto_mapping base_model_name_or_path corda_config eva_config
        exclude_modules kasa_config layer_replication layers_pattern layers_to_transform lora_ga_config megatron_config
        modules_to_save monteclora_config revision target_modules target_parameters task_type trainable_token_indices
        use_bdlora velora_config""",
        )
    ),
    **dict.fromkeys(
        (
            "ensure_weight_tying",
            "fan_in_fan_out",
            "inference_mode",
            "lora_bias",
            "use_dora",
            "use_qalora",
            "use_rslora",
        ),
        False,
    ),
    "alpha_pattern": {},
    "bias": "none",
    "init_lora_weights": True,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "megatron_core": "megatron.core",
    "peft_type": "LORA",
    "peft_version": None,
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
}
"""All options of a LoraConfig."""
READ = frozenset(
    re.findall(
        r"\w+",
        """r lora_alpha lora_dropout target_modules exclude_modules modules_to_save use_rslora use_dora rank_pattern
    alpha_pattern target_parameters fan_in_fan_out ensure_weight_tying init_lora_weights peft_type""",
    )
)
"""Options that are read, or checked on their own."""
NEUTRAL = frozenset(
    re.findall(
        r"\w+",
        """auto_mapping base_model_name_or_path eva_config inference_mode loftq_config megatron_core peft_version
    qalora_group_size revision runtime_config task_type""",
    )
)
"""Options that change nothing in a trained adapter."""
INITIAL_VALUES = (True, False, "gaussian", "orthogonal", "eva")
"""Kinds of initial values that leave the weights of the base as they are."""
ALL_LINEAR = "all-linear"


def read_config(directory: Path) -> dict[str, Any]:
    """The content of adapter_config.json, after a check that the adapter is one that can be computed here."""
    path = directory / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a readable {CONFIG_FILE}: {one_line(error)}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: not an adapter's configuration: expected a mapping")
    if (kind := config.get("peft_type")) != "LORA":
        raise UserError(f"{path}: peft_type={kind}: not supported; nearest: LORA")
    start = config.get("init_lora_weights", True)
    if start not in INITIAL_VALUES:
        raise UserError(
            f"{path}: init_lora_weights={start}: it needs the base weights as PEFT changed them; nearest: "
            "PEFT's save_pretrained with path_initial_model_for_weight_conversion"
        )
    for key, value in config.items():
        default = DEFAULTS.get(key)
        if key not in READ | NEUTRAL and value != default and value not in EMPTY_VALUES:
            nearest = f"nearest: {json.dumps(default)}" if key in DEFAULTS else "remove it if it changes no numbers"
            raise UserError(f"{path}: {key}={str(value)[:60]}: not supported; {nearest}")
    return config


def read_options(config: Mapping[str, Any], modules: Collection[str], where: str) -> dict[str, Any]:
    """Values of LoraKeys, besides `targets` and `train`, of an adapter that these modules have. `where` names it."""
    values = {}
    for key, pattern_key in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        patterns = config.get(pattern_key) or {}
        default = config.get(key, DEFAULTS[key])
        found = {module: _pattern_value(patterns, module, default) for module in sorted(modules)}
        first = next(iter(found.values()), default)
        if other := next((module for module, value in found.items() if value != first), None):
            raise UserError(
                f"{where}: {pattern_key}: {other} has {found[other]}, {next(iter(found))} {first}; "
                f"not supported; nearest: one {key} for all modules"
            )
        values[key] = first
    return {
        "rank": values["r"],
        "alpha": values["lora_alpha"],
        "rank_stabilized": bool(config.get("use_rslora")),
        "dropout": config.get("lora_dropout", 0.0),
        "dora": bool(config.get("use_dora")),
    }


def write_options(
    options: LoraKeys,
    modules: Collection[str],
    linear_modules: Collection[str],
    trained_modules: Iterable[str],
    base: str | None,
    **others: Any,
) -> dict[str, Any]:
    """The configuration of an adapter that `modules`, some of a model's `linear_modules`, have. `trained_modules` are
    trained as they are, `base` is the model that it belongs to, and `others` are values of more keys."""
    saved = sorted({module.rpartition(".")[2] for module in trained_modules})
    return DEFAULTS | {
        "base_model_name_or_path": base,
        "inference_mode": True,
        "lora_alpha": int(options.alpha) if options.alpha.is_integer() else options.alpha,
        "lora_dropout": options.dropout,
        "modules_to_save": saved or None,
        "peft_version": PEFT_VERSION,
        "r": options.rank,
        "target_modules": _shortest_names(modules, linear_modules),
        "use_dora": options.dora,
        "use_rslora": options.rank_stabilized,
        **others,
    }


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """The file, as PEFT writes it."""
    return json.dumps(config, indent=2, sort_keys=True).encode()


def targeted_modules(config: Mapping[str, Any], linear_modules: Iterable[str]) -> set[str]:
    """The modules for which PEFT makes an adapter, by its rules."""
    targets, excluded = config.get("target_modules") or (), config.get("exclude_modules") or ()

    def is_targeted(module: str) -> bool:
        return (targets == ALL_LINEAR or _matches(targets, module)) and not _matches(excluded, module)

    return {module for module in linear_modules if is_targeted(module)}


def _matches(names: str | Iterable[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _pattern_value(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """As PEFT, the value of the first pattern that ends the name of the module."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _shortest_names(modules: Collection[str], linear_modules: Collection[str]) -> list[str]:
    """The ends of the names of `modules` that tell them from the other linear modules."""
    for parts in (1, 2):
        names = sorted({".".join(module.split(".")[-parts:]) for module in modules})
        if targeted_modules({"target_modules": names}, linear_modules) == set(modules):
            return names
    return sorted(modules)
