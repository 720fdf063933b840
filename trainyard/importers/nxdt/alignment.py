"""Fine-tuning, preferences and LoRA of an NxDT file (model_alignment_strategy): our data, preference and lora sections.

NxDT's records have an input, which is not trained, and an output. Where its data set class does something else than
that, a warning names it (found by running the class on a few records), and our run does what the file says.
"""

from pathlib import PurePath
from typing import Any

from trainyard.core.errors import UserError
from trainyard.core.yaml_io import format_value
from trainyard.importers.key_table import ConfigKeys, check_choice

NxdtKeys = dict[str, Any]
ALIGNMENT = "model_alignment_strategy."
SFT, PEFT = f"{ALIGNMENT}sft.", f"{ALIGNMENT}peft."
RECORD_SUFFIXES = (".json", ".jsonl", ".arrow")
LORA_MODULES = {
    "qkv_proj": ("q", "k", "v"),
    "q_proj": ("q",),
    "k_proj": ("k",),
    "v_proj": ("v",),
    "o_proj": ("output",),
    "gate_up_proj": ("gate", "up"),
    "gate_proj": ("gate",),
    "up_proj": ("up",),
    "down_proj": ("down",),
}
"""Our names for lora.targets by NxDT's target_modules."""
PACKING_DEFECTS = (
    "NxDT trains the tokens of the input too (labels equal input_ids); here only those of the output",
    "NxDT's attention mask holds token ids, so records see each other; here each record sees only itself",
    "NxDT loses a record as long as data.seq_length; here it is a sample of its own",
    "NxDT writes the end-of-text token twice after a record; here once",
)


DPO_DEFECTS = (
    "NxDT joins the scores of the reference with pairs in another order; here each pair has its own",
    "NxDT cuts off prompts and answers; here pairs of more than data.seq_len tokens are dropped and counted",
)
ORPO_DEFECTS = ("NxDT's odds ratio is not finite for answers of probability 1; here it is", *DPO_DEFECTS[1:])


def objective(keys: NxdtKeys) -> str | None:
    """Our train.objective."""
    return next((name for name in ("dpo", "orpo") if any(key.startswith(f"{ALIGNMENT}{name}.") for key in keys)), None)


def preference_keys(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    """Our keys of train and preference."""
    name = objective(keys)
    if not name:
        return {}
    warnings += [f"{ALIGNMENT}{name}: {defect}" for defect in (DPO_DEFECTS if name == "dpo" else ORPO_DEFECTS)]
    beta = keys.get(f"{ALIGNMENT}dpo.kl_beta" if name == "dpo" else f"{ALIGNMENT}orpo.beta")
    found: ConfigKeys = {"train.objective": name} | ({} if beta is None else {"preference.beta": float(beta)})
    if variant := keys.get(f"{ALIGNMENT}dpo.loss_type"):
        check_choice(f"{ALIGNMENT}dpo.loss_type", variant, ("sigmoid", "hinge", "ipo", "robust"), "sigmoid")
        found["preference.variant"] = variant
    return found


def is_sft(keys: NxdtKeys) -> bool:
    """True if the file trains on records: one of its keys says so, or the name of the data."""
    path = str(keys.get("data.train_dir") or "")
    return bool(path) and (f"{SFT}packing" in keys or "data.packing" in keys or path.endswith(RECORD_SUFFIXES))


def chat_data(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    """Our keys of data for records with input and output."""
    path, name = PurePath(keys["data.train_dir"]), f"{SFT}packing"
    if path.suffix == ".arrow":
        path = path.parent  # a file of a directory that the datasets library saved, which is read as a whole
    longest, seq_len = keys.get("model.encoder_seq_length"), keys.get("data.seq_length")
    seq_len = seq_len or longest
    if seq_len is None or (longest and seq_len > longest):
        raise UserError(
            f"data.seq_length={format_value(seq_len)}: required, and at most "
            f"model.encoder_seq_length={format_value(longest)}; nearest: {longest or 4096}"
        )
    if objective(keys):  # which share a sample
        about = {"data.source": "preference", "data.paths": [str(path)], "data.chat.too_long": "drop"}
        return {**about, "data.seq_len": 2 * seq_len}
    name = name if name in keys else "data.packing"
    packing = bool(keys.get(name))
    warnings += [f"{name}=true: {defect}" for defect in PACKING_DEFECTS] if packing else []
    warnings.append(
        f"data.seq_length={seq_len}: longer records are dropped, as in NxDT, and counted (data.chat.too_long=drop)"
    )
    return {
        "data.source": "chat",
        "data.paths": [str(path)],
        "data.seq_len": seq_len,
        "data.packing": packing,
        "data.chat.format": "input_output",
        "data.chat.too_long": "drop",
    }


def lora_keys(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    """The lora section."""
    options = {name.removeprefix(PEFT): value for name, value in keys.items() if name.startswith(PEFT)}
    if not options:
        return {}
    for name, nearest in (("lora_rank", 16), ("lora_alpha", 32), ("target_modules", "[qkv_proj]")):
        if name not in options:
            raise UserError(f"{PEFT}{name}: missing; nearest: {nearest}")
    modules = options["target_modules"]
    for module in modules:
        check_choice(f"{PEFT}target_modules", module, LORA_MODULES, "qkv_proj")
    if {"qkv_proj", "gate_up_proj"} & set(modules):
        warnings.append(
            f"{PEFT}target_modules={format_value(modules)}: NxDT has one A for a fused layer; here q, k, v, gate and "
            "up have their own, as in PEFT"
        )
    return {
        "lora.rank": options["lora_rank"],
        "lora.alpha": float(options["lora_alpha"]),
        "lora.dropout": float(options.get("lora_dropout", 0.0)),
        "lora.targets": list(dict.fromkeys(target for module in modules for target in LORA_MODULES[module])),
    }
