"""The model section from an NxDT file: from the config.json that it names (Hugging Face), or from its sizes (Megatron).

If the config.json is missing, a published model that matches the rest of the file supplies the sizes, with a warning.
"""

from pathlib import Path
from typing import Any

from trainyard.core.errors import UserError
from trainyard.core.yaml_io import format_value
from trainyard.families import find_family
from trainyard.families.hf_config import from_hf
from trainyard.importers.key_table import check_choice, check_family, find_path
from trainyard.importers.known_models import find_known_model, vocab_size

NxdtKeys = dict[str, Any]
REQUIRED_VALUES: dict[str, dict[str, object]] = {
    "llama": {"model.normalization": "rmsnorm", "model.position_embedding_type": "rope", "model.has_bias": False},
    "gpt": {
        "model.normalization": "layernorm",
        "model.position_embedding_type": "learned_absolute",
        "model.has_bias": True,
    },
}
"""Values of NxDT's keys by model family; those of gpt are also NxDT's defaults."""
ACTIVATION_FAMILY = {"swiglu": "llama", "gelu": "gpt"}
OVERRIDE_HINT = "or set the keys, such as model.vocab=32000"
CONFIG_JSON_KEYS = "vocab_size, num_attention_heads, num_key_value_heads, intermediate_size"


def hf_model_section(keys: NxdtKeys, directory: Path, warnings: list[str]) -> tuple[dict[str, Any], str]:
    """Return our model section, and a hint where values of missing keys come from."""
    config_name = keys.get("model.model_config")
    names = {"layers": "num_layers", "hidden": "hidden_size", "rope_theta": "rope_theta"}
    overrides = {key: keys.get(f"model.{name}", -1) for key, name in names.items()}
    overrides = {key: value for key, value in overrides.items() if value != -1}  # -1: the value in config.json
    if "rope_theta" in overrides:
        overrides["rope_theta"] = float(overrides["rope_theta"])
    if "model.max_position_embeddings" in keys:
        overrides["max_positions"] = keys["model.max_position_embeddings"]
    experts = _experts(keys, warnings)
    if "mixtral" in str(keys.get("name", "")).lower() and not experts:
        raise UserError(f"name={keys['name']}: NxDT trains a Mixtral, but model.moe.num_experts is missing; nearest: 8")
    overrides |= experts
    hint = ""
    path = _find_config_json(config_name, directory)
    if path:
        model: dict[str, Any] = from_hf(path).model_dump(mode="json")
        wanted = "mixtral" if experts else "llama"
        has_other_layers = experts or "experts" in model
        if model["family"] != wanted and (has_other_layers or not find_family(model["family"]).nxd_styles):
            source = "with model.moe" if experts else "without model.moe"
            raise UserError(f"{path}: a {model['family']} model, but NxDT's model_source=hf {source} trains {wanted}")
        if overrides.get("hidden", model["hidden"]) != model["hidden"]:
            model["head_dim"] = None  # hidden / heads, as in NxDT
    else:
        known = find_known_model(overrides)
        name = format_value(config_name)
        hint = f"model.model_config={name} is missing and would set {CONFIG_JSON_KEYS}; provide it, {OVERRIDE_HINT}"
        model = known.model_section() if known else {"family": "mixtral" if experts else "llama"}
        if known:
            layers = overrides.get("layers", known.layers)
            shortened = f", with {layers} of {known.layers} layers" if layers != known.layers else ""
            warnings.append(
                f"model.model_config={name}: missing; using the sizes of {known.name}{shortened} (vocab={known.vocab}, "
                f"heads={known.heads}, kv_heads={known.kv_heads}, ffn={known.ffn}, rope_scaling="
                f"{'llama3' if known.rope_scaling else 'none'}); provide the file to be sure"
            )
    # NxDT uses the larger of its own key and config.json's.
    max_positions = max(keys.get("model.max_position_embeddings") or 0, model.get("max_positions", 0) if path else 0)
    model |= overrides | ({"max_positions": max_positions} if max_positions else {})
    fuse_qkv = {"fuse_qkv": keys["model.fuse_qkv"]} if "model.fuse_qkv" in keys else {}
    return model | {"scaled_init": False} | fuse_qkv, hint


def megatron_model_section(keys: NxdtKeys, warnings: list[str]) -> tuple[dict[str, Any], str]:
    """Return our model section, and a hint where values of missing keys come from."""
    activation = keys.get("model.activation") or "gelu"
    check_choice("model.activation", activation, ACTIVATION_FAMILY, "swiglu")
    family = ACTIVATION_FAMILY[activation]
    found = {name: keys.get(name, default) for name, default in REQUIRED_VALUES["gpt"].items()}
    check_family(family, f"with activation={activation}", found, REQUIRED_VALUES[family])
    heads, hidden = keys.get("model.num_attention_heads"), keys.get("model.hidden_size")
    files = [keys.get(f"data.tokenizer.{name}") for name in ("vocab_file", "type", "model")]
    model: dict[str, Any] = {
        "family": family,
        "vocab": vocab_size(files, keys.get("data.tokenizer.type")),
        "hidden": hidden,
        "layers": keys.get("model.num_layers"),
        "heads": heads,
        "ffn": keys.get("model.ffn_hidden_size") or (4 * hidden if hidden else None),
        "max_positions": keys.get("model.max_position_embeddings") or keys.get("model.encoder_seq_length"),
        "init_std": keys.get("model.init_method_std"),
        "norm_eps": keys.get("model.layernorm_epsilon"),
        "scaled_init": keys.get("model.use_scaled_init_method", True),
        "tie_embeddings": keys.get("model.share_embeddings_and_output_weights", True),
    }
    model |= _llama(keys, heads) if family == "llama" else _gpt(keys, heads, hidden)
    if window := keys.get("model.sliding_window_size"):
        if family != "llama":
            raise UserError(f"model.sliding_window_size={window}: GPT attends to all tokens; nearest: null")
        model |= {"family": "mistral", "sliding_window": window}
    if experts := _experts(keys, warnings):
        if family != "llama":
            raise UserError("model.moe.num_experts: experts are SwiGLU; nearest: activation: swiglu")
        model |= {**experts, "family": "mixtral"}
    model = {key: value for key, value in model.items() if value is not None}
    if "vocab" not in model and (known := find_known_model(model)):
        model["vocab"] = known.vocab
        warnings.append(f"vocab={known.vocab}: the size of {known.name}, because the tokenizer is missing")
    tokenizer = format_value(keys.get("data.tokenizer.type") or keys.get("data.tokenizer.model"))
    hint = f"the vocabulary size comes from the tokenizer (data.tokenizer: {tokenizer}); provide it, {OVERRIDE_HINT}"
    return model, hint


def _experts(keys: NxdtKeys, warnings: list[str]) -> dict[str, Any]:
    """The keys of a mixture of experts, which all files with model.moe.num_experts have."""
    moe = {name.removeprefix("model.moe."): value for name, value in keys.items() if name.startswith("model.moe.")}
    if not moe.get("num_experts") or moe["num_experts"] == 1:
        return {}
    section: dict[str, Any] = {
        "experts": moe["num_experts"],
        "top_k": moe.get("top_k", 2),
        "normalize_top_k": moe.get("normalize_top_k_affinities", True),
        "balance_loss": float(moe.get("router_aux_loss_coef", 0.02)) if moe.get("output_router_logits") else 0.0,
    }
    if not moe.get("output_router_logits"):
        warnings.append("model.moe.output_router_logits=false: no load-balancing loss, so model.balance_loss=0.0")
    if moe.get("dropless"):
        return section
    if (factor := moe.get("capacity_factor", 2.0)) <= 0:
        raise UserError(f"model.moe.capacity_factor={factor}: above 0 unless dropless; nearest: 2.0")
    warnings.append(
        f"model.moe.capacity_factor={format_value(factor)}: limits the tokens of each sample; NxDT limits those of a "
        "micro batch"
    )
    return {**section, "capacity_factor": float(factor)}


def _llama(keys: NxdtKeys, heads: int | None) -> dict[str, Any]:
    for name in ("hidden_dropout", "attention_dropout", "ffn_dropout"):
        if keys.get(f"model.{name}"):
            raise UserError(f"model.{name}={keys[f'model.{name}']}: our Llama has no dropout; nearest: 0.0")
    factor = keys.get("model.positition_interpolation_factor") or keys.get("model.position_interpolation_factor") or 1
    base, abf_factor = keys.get("model.position_freq_base") or 10000, keys.get("model.position_abf_factor") or 1
    return {
        "kv_heads": keys.get("model.num_kv_heads") or heads,
        "head_dim": keys.get("model.kv_channels"),
        "rope_theta": float(base * abf_factor),
        "rope_scaling": {"kind": "linear", "factor": float(factor)} if factor != 1 else None,
    }


def _gpt(keys: NxdtKeys, heads: int | None, hidden: int | None) -> dict[str, Any]:
    kv_heads, head_dim = keys.get("model.num_kv_heads"), keys.get("model.kv_channels")
    if kv_heads not in (None, heads):
        raise UserError(f"model.num_kv_heads={kv_heads}: GPT has one kv head per head; nearest: {heads}")
    if head_dim and heads and hidden and head_dim * heads != hidden:
        raise UserError(f"model.kv_channels={head_dim}: the head size of GPT is hidden_size / heads; nearest: null")
    hidden_dropout = float(keys.get("model.hidden_dropout", 0.1))
    return {
        "activation": "gelu",
        "hidden_dropout": hidden_dropout,
        "embedding_dropout": hidden_dropout,
        "attention_dropout": float(keys.get("model.attention_dropout", 0.0)),
    }


def _find_config_json(name: str | None, directory: Path) -> Path | None:
    """Find the config.json, which may be named relative to the NxDT file."""
    if name is None:
        raise UserError("model.model_config: missing; needed: the path of a Hugging Face config.json")
    path = find_path(name, relative_to=directory)
    return find_path(path / "config.json") if path and path.is_dir() else path
