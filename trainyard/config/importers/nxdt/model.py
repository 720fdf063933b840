"""The model section from an NxDT file: from the config.json it names (Hugging Face), or from its own sizes (Megatron).

A config.json that is not here is replaced by the published sizes that the rest of the file fits, and that is said.
"""

from pathlib import Path
from typing import Any

from trainyard.config.hf_config import from_hf
from trainyard.config.importers.key_table import find_path, format_value
from trainyard.config.importers.known_models import GPT2_VOCAB, find_known_model, vocab_size_from_file
from trainyard.core.errors import UserError

NxdtKeys = dict[str, Any]
FAMILY_KEYS: dict[str, dict[str, object]] = {
    "llama": {"normalization": "rmsnorm", "position_embedding_type": "rope", "has_bias": False},
    "gpt": {"normalization": "layernorm", "position_embedding_type": "learned_absolute", "has_bias": True},
}
"""What our families are, in their words."""
ACTIVATION_FAMILY = {"swiglu": "llama", "gelu": "gpt"}
NXDT_DEFAULTS = {"normalization": "layernorm", "position_embedding_type": "learned_absolute", "has_bias": True}
OVERRIDE_HINT = "or give the keys, such as model.vocab=32000"


def hf_model_section(said: NxdtKeys, directory: Path, warn: list[str]) -> tuple[dict[str, Any], str]:
    """Our model section, and where its missing keys would come from."""
    named = said.get("model.model_config")
    own = {
        "layers": _size_or_none(said, "model.num_layers"),
        "hidden": _size_or_none(said, "model.hidden_size"),
        "rope_theta": _rope_theta(said.get("model.rope_theta")),
        "max_positions": said.get("model.max_position_embeddings"),
    }
    own = {key: value for key, value in own.items() if value is not None}
    if "mixtral" in str(said.get("name", "")).lower():
        raise UserError(f"name={said['name']}: mixture of experts: models are dense here; nearest: a Llama")
    hint = ""
    path = _find_config_json(named, directory)
    if path:
        model: dict[str, Any] = from_hf(path).model_dump(mode="json")
        if model["family"] != "llama":
            raise UserError(f"{path}: a {model['family']} model, but NxDT's model_source=hf trains Llama")
        if own.get("hidden", model["hidden"]) != model["hidden"]:
            model["head_dim"] = None  # hidden / heads, there as here
    else:
        shape = find_known_model(own)
        missing = "vocab_size, num_attention_heads, num_key_value_heads, intermediate_size"
        hint = f"model.model_config={format_value(named)} is not there and would bring {missing}; put it there, {OVERRIDE_HINT}"
        model = shape.model_section() if shape else {"family": "llama"}
        if shape:
            layers = own.get("layers", shape.layers)
            cut = f", with {layers} of {shape.layers} layers" if layers != shape.layers else ""
            warn.append(
                f"model.model_config={format_value(named)}: not there; sizes are those of {shape.name}{cut} (vocab="
                f"{shape.vocab}, heads={shape.heads}, kv_heads={shape.kv_heads}, ffn={shape.ffn}, rope_scaling="
                f"{'llama3' if shape.rope_scaling else 'none'}); put the file there to be sure"
            )
    longest = max(said.get("model.max_position_embeddings") or 0, model.get("max_positions", 0) if path else 0)
    model |= own | ({"max_positions": longest} if longest else {})
    fused = said.get("model.fuse_qkv")
    return model | {"scaled_init": False} | ({} if fused is None else {"fuse_qkv": fused}), hint


def megatron_model_section(said: NxdtKeys, warn: list[str]) -> tuple[dict[str, Any], str]:
    """Our model section, and where its missing keys would come from."""
    activation = said.get("model.activation") or "gelu"
    family = ACTIVATION_FAMILY.get(activation)
    if family is None:
        raise UserError(f"model.activation={activation}: not one of {', '.join(ACTIVATION_FAMILY)}; nearest: swiglu")
    for name, wanted in FAMILY_KEYS[family].items():
        found = said.get(f"model.{name}")
        found = NXDT_DEFAULTS[name] if found is None else found
        if found != wanted:
            raise UserError(
                f"model.{name}={format_value(found)}: with activation={activation} only {format_value(wanted)} is there ({family}); "
                f"nearest: {format_value(wanted)}"
            )
    heads, hidden = said.get("model.num_attention_heads"), said.get("model.hidden_size")
    tied = said.get("model.share_embeddings_and_output_weights")
    scaled = said.get("model.use_scaled_init_method")
    model: dict[str, Any] = {
        "family": family,
        "vocab": _vocab_size(said),
        "hidden": hidden,
        "layers": said.get("model.num_layers"),
        "heads": heads,
        "ffn": said.get("model.ffn_hidden_size") or (4 * hidden if hidden else None),
        "max_positions": said.get("model.max_position_embeddings") or said.get("model.encoder_seq_length"),
        "init_std": said.get("model.init_method_std"),
        "norm_eps": said.get("model.layernorm_epsilon"),
        "scaled_init": True if scaled is None else scaled,
        "tie_embeddings": True if tied is None else tied,
    }
    model |= _llama(said, heads, hidden) if family == "llama" else _gpt(said, heads, hidden)
    model = {key: value for key, value in model.items() if value is not None}
    if "vocab" not in model and (shape := find_known_model(model)):
        model["vocab"] = shape.vocab
        warn.append(f"vocab={shape.vocab} is that of {shape.name}: the tokenizer that says it is not here")
    where = said.get("data.tokenizer.type") or said.get("data.tokenizer.model")
    return (
        model,
        f"the vocabulary is the tokenizer's (data.tokenizer: {format_value(where)}); put it there, {OVERRIDE_HINT}",
    )


def _llama(said: NxdtKeys, heads: int | None, hidden: int | None) -> dict[str, Any]:
    for name in ("hidden_dropout", "attention_dropout", "ffn_dropout"):
        if said.get(f"model.{name}"):
            raise UserError(f"model.{name}={said[f'model.{name}']}: Llama has no dropout here; nearest: 0.0")
    factor = said.get("model.positition_interpolation_factor") or said.get("model.position_interpolation_factor") or 1
    base, stretch = said.get("model.position_freq_base") or 10000, said.get("model.position_abf_factor") or 1
    return {
        "kv_heads": said.get("model.num_kv_heads") or heads,
        "head_dim": said.get("model.kv_channels"),
        "rope_theta": _rope_theta(base * stretch),
        "rope_scaling": {"kind": "linear", "factor": float(factor)} if factor != 1 else None,
    }


def _gpt(said: NxdtKeys, heads: int | None, hidden: int | None) -> dict[str, Any]:
    kv = said.get("model.num_kv_heads")
    if kv not in (None, heads):
        raise UserError(f"model.num_kv_heads={kv}: GPT has a key and value head for each of {heads}; nearest: {heads}")
    wide = said.get("model.kv_channels")
    if wide and heads and hidden and wide * heads != hidden:
        raise UserError(f"model.kv_channels={wide}: GPT's heads are hidden_size / heads wide; nearest: null")
    hidden_dropout, attention = said.get("model.hidden_dropout"), said.get("model.attention_dropout")
    everywhere = 0.1 if hidden_dropout is None else float(hidden_dropout)
    return {
        "activation": "gelu",
        "hidden_dropout": everywhere,
        "embedding_dropout": everywhere,
        "attention_dropout": float(attention or 0.0),
    }


def _vocab_size(said: NxdtKeys) -> int | None:
    tokenizer = "data.tokenizer."
    for name in ("vocab_file", "type", "model"):
        path = said.get(tokenizer + name)
        if path and (found := vocab_size_from_file(path)):
            return found
    return GPT2_VOCAB if said.get(tokenizer + "type") == "GPT2BPETokenizer" else None


def _find_config_json(named: str | None, directory: Path) -> Path | None:
    """The config.json, as named or beside the file that names it."""
    if named is None:
        raise UserError("model.model_config: missing; wanted: the path of a Hugging Face config.json")
    path = find_path(named, relative_to=directory)
    return find_path(path / "config.json") if path and path.is_dir() else path


def _size_or_none(said: NxdtKeys, name: str) -> int | None:
    """-1 leaves it to config.json."""
    value = said.get(name)
    return None if value == -1 else value


def _rope_theta(value: float | None) -> float | None:
    return None if value in (None, -1) else float(value or 0)
