"""Conversion of the model section from and to a Hugging Face config.json.

transformers 5 moved `rope_theta` and `rope_scaling` into `rope_parameters` and renamed `torch_dtype` to `dtype`. Both
forms are read, and a written config.json is readable by transformers 4 and 5.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from trainyard.config.model_schema import BertConfig, GptConfig, LlamaConfig, ModelConfig
from trainyard.core.errors import UserError

REQUIRED = object()
"""Default of keys that a config.json must have."""
GELU_NAMES = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
HF_GELU_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
ROPE_KEYS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_positions": "original_max_position_embeddings",
    },
}
"""Key of transformers by our key, for each kind of RoPE scaling."""


class HfFormat(NamedTuple):
    """How one model family is written in config.json."""

    config_class: type[ModelConfig]
    family: str
    architecture: str
    keys: dict[str, tuple[str, object]]
    """Key of transformers and its default there, by our key."""
    supported: dict[str, object]
    """Options of transformers that change the numerics, with the only supported value (also their default)."""


FORMATS = {
    "llama": HfFormat(
        LlamaConfig,
        "llama",
        "LlamaForCausalLM",
        {
            "vocab": ("vocab_size", REQUIRED),
            "hidden": ("hidden_size", REQUIRED),
            "ffn": ("intermediate_size", REQUIRED),
            "layers": ("num_hidden_layers", REQUIRED),
            "heads": ("num_attention_heads", REQUIRED),
            "kv_heads": ("num_key_value_heads", None),
            "head_dim": ("head_dim", None),
            "max_positions": ("max_position_embeddings", 2048),
            "norm_eps": ("rms_norm_eps", 1e-6),
            "tie_embeddings": ("tie_word_embeddings", False),
            "init_std": ("initializer_range", 0.02),
            "bos_token_id": ("bos_token_id", 1),
            "eos_token_id": ("eos_token_id", 2),
            "pad_token_id": ("pad_token_id", None),
        },
        {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"},
    ),
    "gpt2": HfFormat(
        GptConfig,
        "gpt",
        "GPT2LMHeadModel",
        {
            "vocab": ("vocab_size", REQUIRED),
            "hidden": ("n_embd", REQUIRED),
            "layers": ("n_layer", REQUIRED),
            "heads": ("n_head", REQUIRED),
            "ffn": ("n_inner", None),
            "max_positions": ("n_positions", 1024),
            "activation": ("activation_function", "gelu_new"),
            "embedding_dropout": ("embd_pdrop", 0.1),
            "hidden_dropout": ("resid_pdrop", 0.1),
            "attention_dropout": ("attn_pdrop", 0.1),
            "norm_eps": ("layer_norm_epsilon", 1e-5),
            "tie_embeddings": ("tie_word_embeddings", True),
            "init_std": ("initializer_range", 0.02),
            "bos_token_id": ("bos_token_id", 50256),
            "eos_token_id": ("eos_token_id", 50256),
            "pad_token_id": ("pad_token_id", None),
        },
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ),
    "bert": HfFormat(
        BertConfig,
        "bert",
        "BertForPreTraining",
        {
            "vocab": ("vocab_size", REQUIRED),
            "hidden": ("hidden_size", REQUIRED),
            "layers": ("num_hidden_layers", REQUIRED),
            "heads": ("num_attention_heads", REQUIRED),
            "ffn": ("intermediate_size", REQUIRED),
            "max_positions": ("max_position_embeddings", 512),
            "segments": ("type_vocab_size", 2),
            "activation": ("hidden_act", "gelu"),
            "hidden_dropout": ("hidden_dropout_prob", 0.1),
            "attention_dropout": ("attention_probs_dropout_prob", 0.1),
            "norm_eps": ("layer_norm_eps", 1e-12),
            "init_std": ("initializer_range", 0.02),
            "bos_token_id": ("bos_token_id", None),
            "eos_token_id": ("eos_token_id", None),
            "pad_token_id": ("pad_token_id", 0),
        },
        {"position_embedding_type": "absolute", "is_decoder": False, "tie_word_embeddings": True},
    ),
}
"""By the value of `model_type`."""


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
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise UserError(f"{name}: model_type={kind}: not supported; one of {', '.join(FORMATS)}")
    try:
        return _read(data, FORMATS[kind])
    except KeyError as error:
        raise UserError(f"{name}: {error.args[0]}: missing") from None
    except (TypeError, AttributeError):
        raise UserError(f"{name}: not a config.json of {kind}: a value has the wrong type") from None
    except ValidationError as error:
        mistake = error.errors()[0]
        key = ".".join(map(str, mistake["loc"]))
        hf_key, _ = FORMATS[kind].keys.get(key, (key, None))
        raise UserError(f"{name}: {hf_key}={mistake['input']}: {mistake['msg']}") from None
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def to_hf(model: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """Return a config.json that transformers 4 and 5 read."""
    kind, hf = next((kind, hf) for kind, hf in FORMATS.items() if isinstance(model, hf.config_class))
    data: dict[str, Any] = {"architectures": [hf.architecture], "model_type": kind}
    data |= {hf_key: getattr(model, key) for key, (hf_key, _) in hf.keys.items()}
    if isinstance(model, LlamaConfig):
        rope = _rope_to_hf(model)
        data |= {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_size, **hf.supported}
        data |= {
            "rope_theta": model.rope_theta,
            "rope_scaling": rope if rope["rope_type"] != "default" else None,
            "rope_parameters": {"rope_theta": model.rope_theta, **rope},
        }
    else:
        data[hf.keys["activation"][0]] = HF_GELU_NAMES[model.activation]
    if isinstance(model, BertConfig):
        data["intermediate_size"] = model.ffn_size
    if model.eos_token_id and len(model.eos_token_id) == 1:
        (data["eos_token_id"],) = model.eos_token_id
    return data | {"torch_dtype": dtype, "dtype": dtype}


def _read(data: dict[str, Any], hf: HfFormat) -> ModelConfig:
    for hf_key, value in hf.supported.items():
        if data.get(hf_key, value) != value:
            raise ValueError(f"{hf_key}={data[hf_key]}: not supported; nearest: {value}")
    values = {
        key: data[hf_key] if default is REQUIRED else data.get(hf_key, default)
        for key, (hf_key, default) in hf.keys.items()
    }
    if hf.config_class is LlamaConfig:
        rope = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
        values["rope_theta"] = float(rope.get("rope_theta") or data.get("rope_theta") or 10000.0)
        values["rope_scaling"] = _rope_from_hf(rope)
    elif values["activation"] not in GELU_NAMES:
        raise ValueError(f"activation {values['activation']}: not supported; one of {', '.join(GELU_NAMES)}")
    else:
        values["activation"] = GELU_NAMES[values["activation"]]
    return hf.config_class.model_validate({"family": hf.family, **values})


def _rope_from_hf(rope: dict[str, Any]) -> dict[str, Any] | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ROPE_KEYS:
        raise ValueError(f"rope_type={kind}: not supported; one of default, {', '.join(ROPE_KEYS)}")
    values = {key: rope[hf_key] for key, hf_key in ROPE_KEYS[kind].items()}
    floats = {key: float(value) for key, value in values.items() if key != "original_max_positions"}
    return {"kind": kind, **values, **floats}


def _rope_to_hf(model: LlamaConfig) -> dict[str, Any]:
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    return {"rope_type": scaling.kind, **{hf: getattr(scaling, key) for key, hf in ROPE_KEYS[scaling.kind].items()}}
