"""The model section from an NxDT file: from the config.json that it names (Hugging Face), or from its sizes (Megatron).

If the config.json is missing, a published model that matches the rest of the file supplies the sizes, with a warning.
"""

from pathlib import Path
from typing import Any

from trainyard.config.hf_config import from_hf
from trainyard.config.importers.key_table import find_path
from trainyard.config.importers.known_models import GPT2_VOCAB, find_known_model, vocab_size_from_file
from trainyard.config.yaml_io import format_value
from trainyard.core.errors import UserError

NxdtKeys = dict[str, Any]
FAMILY_KEYS: dict[str, dict[str, object]] = {
    "llama": {"normalization": "rmsnorm", "position_embedding_type": "rope", "has_bias": False},
    "gpt": {"normalization": "layernorm", "position_embedding_type": "learned_absolute", "has_bias": True},
}
"""Values of NxDT's keys that each of our families requires."""
ACTIVATION_FAMILY = {"swiglu": "llama", "gelu": "gpt"}
NXDT_DEFAULTS = FAMILY_KEYS["gpt"]
OVERRIDE_HINT = "or set the keys, such as model.vocab=32000"
CONFIG_JSON_KEYS = "vocab_size, num_attention_heads, num_key_value_heads, intermediate_size"


def hf_model_section(keys: NxdtKeys, directory: Path, warnings: list[str]) -> tuple[dict[str, Any], str]:
    """Return our model section, and a hint where values of missing keys come from."""
    config_name = keys.get("model.model_config")
    overrides = {
        "layers": _size_or_none(keys, "model.num_layers"),
        "hidden": _size_or_none(keys, "model.hidden_size"),
        "rope_theta": _rope_theta(keys.get("model.rope_theta")),
        "max_positions": keys.get("model.max_position_embeddings"),
    }
    overrides = {key: value for key, value in overrides.items() if value is not None}
    if "mixtral" in str(keys.get("name", "")).lower():
        raise UserError(f"name={keys['name']}: mixture of experts: only dense models are supported; nearest: a Llama")
    hint = ""
    path = _find_config_json(config_name, directory)
    if path:
        model: dict[str, Any] = from_hf(path).model_dump(mode="json")
        if model["family"] != "llama":
            raise UserError(f"{path}: a {model['family']} model, but NxDT's model_source=hf trains Llama")
        if overrides.get("hidden", model["hidden"]) != model["hidden"]:
            model["head_dim"] = None  # hidden / heads, as in NxDT
    else:
        known = find_known_model(overrides)
        name = format_value(config_name)
        hint = f"model.model_config={name} is missing and would set {CONFIG_JSON_KEYS}; provide it, {OVERRIDE_HINT}"
        model = known.model_section() if known else {"family": "llama"}
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
    fuse_qkv = keys.get("model.fuse_qkv")
    return model | {"scaled_init": False} | ({} if fuse_qkv is None else {"fuse_qkv": fuse_qkv}), hint


def megatron_model_section(keys: NxdtKeys, warnings: list[str]) -> tuple[dict[str, Any], str]:
    """Return our model section, and a hint where values of missing keys come from."""
    activation = keys.get("model.activation") or "gelu"
    family = ACTIVATION_FAMILY.get(activation)
    if family is None:
        raise UserError(f"model.activation={activation}: not one of {', '.join(ACTIVATION_FAMILY)}; nearest: swiglu")
    for name, required in FAMILY_KEYS[family].items():
        value = keys.get(f"model.{name}")
        value = NXDT_DEFAULTS[name] if value is None else value
        if value != required:
            raise UserError(
                f"model.{name}={format_value(value)}: not supported with activation={activation} (family {family}); "
                f"nearest: {format_value(required)}"
            )
    heads, hidden = keys.get("model.num_attention_heads"), keys.get("model.hidden_size")
    tie_embeddings = keys.get("model.share_embeddings_and_output_weights")
    scaled_init = keys.get("model.use_scaled_init_method")
    model: dict[str, Any] = {
        "family": family,
        "vocab": _vocab_size(keys),
        "hidden": hidden,
        "layers": keys.get("model.num_layers"),
        "heads": heads,
        "ffn": keys.get("model.ffn_hidden_size") or (4 * hidden if hidden else None),
        "max_positions": keys.get("model.max_position_embeddings") or keys.get("model.encoder_seq_length"),
        "init_std": keys.get("model.init_method_std"),
        "norm_eps": keys.get("model.layernorm_epsilon"),
        "scaled_init": True if scaled_init is None else scaled_init,
        "tie_embeddings": True if tie_embeddings is None else tie_embeddings,
    }
    model |= _llama(keys, heads) if family == "llama" else _gpt(keys, heads, hidden)
    model = {key: value for key, value in model.items() if value is not None}
    if "vocab" not in model and (known := find_known_model(model)):
        model["vocab"] = known.vocab
        warnings.append(f"vocab={known.vocab}: the size of {known.name}, because the tokenizer is missing")
    tokenizer = format_value(keys.get("data.tokenizer.type") or keys.get("data.tokenizer.model"))
    hint = f"the vocabulary size comes from the tokenizer (data.tokenizer: {tokenizer}); provide it, {OVERRIDE_HINT}"
    return model, hint


def _llama(keys: NxdtKeys, heads: int | None) -> dict[str, Any]:
    for name in ("hidden_dropout", "attention_dropout", "ffn_dropout"):
        if keys.get(f"model.{name}"):
            raise UserError(f"model.{name}={keys[f'model.{name}']}: our Llama has no dropout; nearest: 0.0")
    factor = keys.get("model.positition_interpolation_factor") or keys.get("model.position_interpolation_factor") or 1
    base, abf_factor = keys.get("model.position_freq_base") or 10000, keys.get("model.position_abf_factor") or 1
    return {
        "kv_heads": keys.get("model.num_kv_heads") or heads,
        "head_dim": keys.get("model.kv_channels"),
        "rope_theta": _rope_theta(base * abf_factor),
        "rope_scaling": {"kind": "linear", "factor": float(factor)} if factor != 1 else None,
    }


def _gpt(keys: NxdtKeys, heads: int | None, hidden: int | None) -> dict[str, Any]:
    kv_heads, head_dim = keys.get("model.num_kv_heads"), keys.get("model.kv_channels")
    if kv_heads not in (None, heads):
        raise UserError(f"model.num_kv_heads={kv_heads}: GPT has one kv head per head; nearest: {heads}")
    if head_dim and heads and hidden and head_dim * heads != hidden:
        raise UserError(f"model.kv_channels={head_dim}: the head size of GPT is hidden_size / heads; nearest: null")
    dropout, attention_dropout = keys.get("model.hidden_dropout"), keys.get("model.attention_dropout")
    hidden_dropout = 0.1 if dropout is None else float(dropout)
    return {
        "activation": "gelu",
        "hidden_dropout": hidden_dropout,
        "embedding_dropout": hidden_dropout,
        "attention_dropout": float(attention_dropout or 0.0),
    }


def _vocab_size(keys: NxdtKeys) -> int | None:
    for name in ("vocab_file", "type", "model"):
        path = keys.get(f"data.tokenizer.{name}")
        if path and (size := vocab_size_from_file(path)):
            return size
    return GPT2_VOCAB if keys.get("data.tokenizer.type") == "GPT2BPETokenizer" else None


def _find_config_json(name: str | None, directory: Path) -> Path | None:
    """Find the config.json, which may be named relative to the NxDT file."""
    if name is None:
        raise UserError("model.model_config: missing; needed: the path of a Hugging Face config.json")
    path = find_path(name, relative_to=directory)
    return find_path(path / "config.json") if path and path.is_dir() else path


def _size_or_none(keys: NxdtKeys, name: str) -> int | None:
    """Return a size; NxDT's -1 stands for the value in config.json."""
    value = keys.get(name)
    return None if value == -1 else value


def _rope_theta(value: float | None) -> float | None:
    return None if value in (None, -1) else float(value or 0)
