"""Conversion of the model section from and to a Hugging Face config.json.

transformers 5 moved `rope_theta` and `rope_scaling` into `rope_parameters` and renamed `torch_dtype` to `dtype`. Both
forms are read, and a written config.json is readable by transformers 4 and 5.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainyard.config.model_schema import (
    BertConfig,
    GptConfig,
    LinearRopeScaling,
    Llama3RopeScaling,
    LlamaConfig,
    ModelConfig,
)
from trainyard.core.errors import UserError

GELU_NAMES = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def from_hf(source: str | Path | dict[str, Any]) -> ModelConfig:
    """Return the model section for a config.json, given as a path, its directory, or its contents."""
    if isinstance(source, dict):
        data, name = source, "config.json"
    else:
        path = Path(source).expanduser()
        path = path / "config.json" if path.is_dir() else path
        name = str(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: not a readable config.json: {error}") from None
        if not isinstance(data, dict):
            raise UserError(f"{path}: not a config.json: expected a mapping, found a {type(data).__name__}")
    readers: dict[Any, Callable[[dict[str, Any]], ModelConfig]] = {"llama": _llama, "gpt2": _gpt, "bert": _bert}
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in readers:
        raise UserError(f"{name}: model_type={kind}: not supported; one of {', '.join(readers)}")
    try:
        return readers[kind](data)
    except KeyError as error:
        raise UserError(f"{name}: {error.args[0]}: missing") from None
    except (TypeError, AttributeError):
        raise UserError(f"{name}: not a config.json of {kind}: a value has the wrong type") from None
    except ValueError as error:
        raise UserError(f"{name}: {_first_line(error)}") from None


def to_hf(model: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """Return a config.json that transformers 4 and 5 read."""
    common = {"torch_dtype": dtype, "dtype": dtype, "initializer_range": model.init_std}
    if isinstance(model, LlamaConfig):
        rope = _rope_to_hf(model)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": model.vocab,
            "hidden_size": model.hidden,
            "intermediate_size": model.ffn,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": model.max_positions,
            "rms_norm_eps": model.norm_eps,
            "rope_theta": model.rope_theta,
            "rope_scaling": rope if rope["rope_type"] != "default" else None,
            "rope_parameters": {"rope_theta": model.rope_theta, **rope},
            "tie_word_embeddings": model.tie_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
            **common,
        }
    activations = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
    if isinstance(model, GptConfig):
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": model.vocab,
            "n_embd": model.hidden,
            "n_layer": model.layers,
            "n_head": model.heads,
            "n_inner": model.ffn,
            "n_positions": model.max_positions,
            "activation_function": activations[model.activation],
            "embd_pdrop": model.embedding_dropout,
            "resid_pdrop": model.hidden_dropout,
            "attn_pdrop": model.attention_dropout,
            "layer_norm_epsilon": model.norm_eps,
            "tie_word_embeddings": model.tie_embeddings,
            **common,
        }
    return {
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": model.max_positions,
        "type_vocab_size": model.segments,
        "hidden_act": activations[model.activation],
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "layer_norm_eps": model.norm_eps,
        **common,
    }


def _llama(data: dict[str, Any]) -> LlamaConfig:
    _require(data, attention_bias=False, mlp_bias=False, hidden_act="silu")
    rope = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    return LlamaConfig(
        family="llama",
        vocab=data["vocab_size"],
        hidden=data["hidden_size"],
        layers=data["num_hidden_layers"],
        heads=data["num_attention_heads"],
        kv_heads=data.get("num_key_value_heads"),
        head_dim=data.get("head_dim"),
        ffn=data["intermediate_size"],
        max_positions=data.get("max_position_embeddings", 2048),
        rope_theta=float(rope.get("rope_theta") or data.get("rope_theta") or 10000.0),
        rope_scaling=_rope_from_hf(rope),
        tie_embeddings=data.get("tie_word_embeddings", False),
        norm_eps=data.get("rms_norm_eps", 1e-6),
        init_std=data.get("initializer_range", 0.02),
    )


def _rope_from_hf(rope: dict[str, Any]) -> LinearRopeScaling | Llama3RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRopeScaling(factor=float(rope["factor"]))
    if kind == "llama3":
        return Llama3RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=rope["original_max_position_embeddings"],
        )
    raise ValueError(f"rope_type={kind}: not supported; one of default, linear, llama3")


def _rope_to_hf(model: LlamaConfig) -> dict[str, Any]:
    scaling = model.rope_scaling
    if isinstance(scaling, LinearRopeScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, Llama3RopeScaling):
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return {"rope_type": "default"}


def _gpt(data: dict[str, Any]) -> GptConfig:
    _require(data, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return GptConfig(
        family="gpt",
        vocab=data["vocab_size"],
        hidden=data["n_embd"],
        layers=data["n_layer"],
        heads=data["n_head"],
        ffn=data.get("n_inner"),
        max_positions=data.get("n_positions", 1024),
        activation=_gelu(data.get("activation_function", "gelu_new")),
        embedding_dropout=data.get("embd_pdrop", 0.1),
        hidden_dropout=data.get("resid_pdrop", 0.1),
        attention_dropout=data.get("attn_pdrop", 0.1),
        norm_eps=data.get("layer_norm_epsilon", 1e-5),
        init_std=data.get("initializer_range", 0.02),
        tie_embeddings=data.get("tie_word_embeddings", True),
    )


def _bert(data: dict[str, Any]) -> BertConfig:
    _require(data, position_embedding_type="absolute", is_decoder=False, tie_word_embeddings=True)
    return BertConfig(
        family="bert",
        vocab=data["vocab_size"],
        hidden=data["hidden_size"],
        layers=data["num_hidden_layers"],
        heads=data["num_attention_heads"],
        ffn=data["intermediate_size"],
        max_positions=data.get("max_position_embeddings", 512),
        segments=data.get("type_vocab_size", 2),
        activation=_gelu(data.get("hidden_act", "gelu")),
        hidden_dropout=data.get("hidden_dropout_prob", 0.1),
        attention_dropout=data.get("attention_probs_dropout_prob", 0.1),
        norm_eps=data.get("layer_norm_eps", 1e-12),
        init_std=data.get("initializer_range", 0.02),
    )


def _gelu(name: str) -> Any:
    if name not in GELU_NAMES:
        raise ValueError(f"activation {name}: not supported; one of {', '.join(GELU_NAMES)}")
    return GELU_NAMES[name]


def _require(data: dict[str, Any], **supported: object) -> None:
    """Raise a ValueError for options of transformers that change the numerics and are not supported here."""
    for key, value in supported.items():
        if data.get(key, value) != value:
            raise ValueError(f"{key}={data[key]}: not supported; nearest: {value}")


def _first_line(error: ValueError) -> str:
    details = getattr(error, "errors", None)
    if callable(details):
        mistake = details()[0]
        return f"{'.'.join(map(str, mistake['loc']))}={mistake['input']}: {mistake['msg']}"
    return str(error)
