"""Conversion of the model section from and to a Hugging Face config.json.

transformers 5 moved `rope_theta` and `rope_scaling` into `rope_parameters` and renamed `torch_dtype` to `dtype`. Both
forms are read, and a written config.json is readable by transformers 4 and 5.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainyard.core.errors import UserError
from trainyard.families.family import REQUIRED, Family
from trainyard.families.model_config import ModelConfig
from trainyard.families.registry import all_families, family_of, find_family
from trainyard.remote.local_copies import local_config

NEUTRAL_KEYS = frozenset(
    re.findall(
        r"\w+",
        """architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
        chunk_size_feed_forward cls_token_id cross_attention_hidden_size decoder_start_token_id
        diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
        exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id fuse_qkv
        gradient_checkpointing id2label is_decoder is_encoder_decoder kv_shared_group_size label2id
        length_penalty mask_token_id max_length min_length model_type move_model_to_device name_or_path neuron
        no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
        output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp
        problem_type qkv_linear remove_invalid_values repetition_penalty return_dict return_dict_in_generate
        selective_checkpoint_enabled sep_token_id sequence_parallel_enabled suppress_tokens
        task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
        transformers_version transpose_nki_inputs typical_p unsloth_version use_bfloat16 use_cache
        use_flash_attention wrap_with_zero""",
    )
)
"""Keys of any config.json that do not change what a model computes, those that Neuron's libraries add included."""
CAUSAL_CLASS, SCORE_CLASS = re.compile("(ForCausalLM|LMHeadModel)$"), "ForSequenceClassification"
"""How the names of transformers' classes end: of models that predict tokens, and of reward models."""
EMPTY_VALUES: tuple[object, ...] = (None, False, 0, "", [], {})
"""Values of an unknown key that leave a model as it is."""


def from_hf(source: str | Path | dict[str, Any], family: str | None = None) -> ModelConfig:
    """Return the model section for a config.json, given as a path, its directory, a URL, a name on the Hub
    (OWNER/NAME, hf://OWNER/NAME@REVISION), or its contents. `family` names the one that reads the file; default: the
    built-in or installed family with its model_type."""
    if isinstance(source, dict):
        data, name = source, "config.json"
    else:
        path = local_config(source)
        path = path / "config.json" if path.is_dir() else path
        name = str(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: not a readable config.json: {error}") from None
        if not isinstance(data, dict):
            raise UserError(f"{path}: not a config.json: expected a mapping, found a {type(data).__name__}")
    candidates = [find_family(family)] if family else all_families().values()
    families = {candidate.hf.model_type: candidate for candidate in candidates}
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in families:
        raise UserError(f"{name}: model_type={kind}: not supported; one of {', '.join(families)}")
    return read_hf(data, families[kind], name)


def read_hf(data: dict[str, Any], family: Family, name: str = "config.json") -> ModelConfig:
    """Return the model section for the contents of the config.json `name` of a family."""
    try:
        return _read(data, family)
    except KeyError as error:
        raise UserError(f"{name}: {error.args[0]}: missing") from None
    except (TypeError, AttributeError):
        raise UserError(f"{name}: not a config.json of {family.hf.model_type}: a value has the wrong type") from None
    except ValidationError as error:
        mistake = error.errors()[0]
        key = ".".join(map(str, mistake["loc"]))
        hf_key, _ = family.hf.keys.get(key, (key, None))
        where = f"{hf_key}={mistake['input']}: " if key else ""  # not the values of all keys
        raise UserError(f"{name}: {where}{mistake['msg'].removeprefix('Value error, ')}") from None
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def to_hf(model: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """Return a config.json that transformers 4 and 5 read."""
    hf = family_of(model).hf
    data: dict[str, Any] = {"architectures": [hf.architecture], "model_type": hf.model_type}
    data |= {hf_key: getattr(model, key) for key, (hf_key, _) in hf.keys.items()}
    data |= {**hf.fixed, **hf.write(model)}
    if model.score_head:
        scored = CAUSAL_CLASS.sub(SCORE_CLASS, hf.architecture)
        data |= {"architectures": [scored], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if model.eos_token_id and len(model.eos_token_id) == 1:
        (data["eos_token_id"],) = model.eos_token_id
    return data | {"torch_dtype": dtype, "dtype": dtype}


def _read(data: dict[str, Any], family: Family) -> ModelConfig:
    hf = family.hf
    for hf_key, value in hf.fixed.items():
        if data.get(hf_key, value) != value:
            raise ValueError(f"{hf_key}={data[hf_key]}: not supported; nearest: {value}")
    _check_unknown_keys(data, family)
    values = {
        key: data[hf_key] if default is REQUIRED else data.get(hf_key, default)
        for key, (hf_key, default) in hf.keys.items()
    }
    score_head = family.is_causal and _has_score_head(data)
    return family.config_class.model_validate(
        {"family": family.name, "score_head": score_head, **values, **hf.read(data)}
    )


def _has_score_head(data: Mapping[str, Any]) -> bool:
    """True if a config.json is that of a reward model. transformers has two labels unless the file names them."""
    if not any(str(name).endswith(SCORE_CLASS) for name in data.get("architectures") or ()):
        return False
    labels = data.get("num_labels", len(data.get("id2label") or (0, 1)))
    if labels != 1:
        raise ValueError(f"num_labels={labels}: a reward model has one; nearest: 1")
    return True


def _check_unknown_keys(data: Mapping[str, Any], family: Family) -> None:
    """Refuse keys that may change what the model computes."""
    hf = family.hf
    known = {*NEUTRAL_KEYS, *hf.fixed, *hf.ignored, *(hf_key for hf_key, _ in hf.keys.values())}
    for key, value in data.items():
        if key.lstrip("_") not in known and value not in EMPTY_VALUES:
            raise ValueError(
                f"{key}={str(value)[:60]}: not known for {hf.model_type}, and may change what the model computes; "
                "remove the key if it does not"
            )
