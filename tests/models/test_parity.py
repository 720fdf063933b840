"""Logits, loss and every gradient agree with transformers, for each family and variant, through the name map."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import configs
from tests.support.hf_reference import LLAMA31, LONGROPE, VARIANTS, hf_forward, hf_reference
from trainyard import models
from trainyard.checkpoint.weights import local_values
from trainyard.core.errors import UserError
from trainyard.families import find_family
from trainyard.families.hf_config import from_hf as config_from_hf
from trainyard.families.hf_config import to_hf as config_to_hf
from trainyard.formats.hf import InMemoryWeights, hf_tensors, weights_from_tensors
from trainyard.formats.io.lazy_tensor import InlineTensor
from trainyard.train.losses.bert_pretraining import BertLoss
from trainyard.train.losses.causal_lm import CausalLoss


def model_from_hf(hf: nn.Module, hf_config: dict[str, Any], **changes: Any) -> tuple[Any, nn.Module]:
    """Our configuration and model with the weights of a transformers model."""
    section = config_from_hf(hf_config).model_copy(update=changes)
    tensors = {name: InlineTensor(tensor) for name, tensor in hf.state_dict().items()}
    values = local_values(weights_from_tensors(section, tensors))
    return section, models.fill_parameters(models.build_model(section), lambda name: values(name).clone())


def file_name(family: str, name: str) -> str:
    """The name in a file of a tensor of a module."""
    return find_family(family).hf.current_name(name, ())


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_and_gradients(variant: str, fuse: bool) -> None:
    family, hf, hf_config = hf_reference(variant)
    changes = {"fuse_qkv": fuse, **({"fuse_gate_up": fuse} if family not in ("gpt", "opt", "bert") else {})}
    section, model = model_from_hf(hf, hf_config, **changes)
    batch = configs.tiny_batch(family)
    hf_logits, hf_loss = hf_forward(family, hf, batch)
    output = model(batch)
    torch.testing.assert_close(output.logits(), hf_logits, atol=1e-5, rtol=1e-5)
    terms = (BertLoss() if family == "bert" else CausalLoss()).terms(output, batch)
    loss = sum(total / count for total, count in terms.values())
    torch.testing.assert_close(loss, hf_loss, atol=1e-5, rtol=1e-5)
    loss.backward()
    hf_loss.backward()
    parameters = dict(model.named_parameters())
    gradients = dict(hf_tensors(InMemoryWeights(section, lambda name: parameters[name].grad)))
    expected = {file_name(family, name): parameter.grad for name, parameter in hf.named_parameters()}
    assert set(gradients) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            gradients[name], gradient, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_round_trip_bit_exact(variant: str, fuse: bool) -> None:
    family, hf, hf_config = hf_reference(variant)
    section, model = model_from_hf(hf, hf_config, fuse_qkv=fuse)
    exported = dict(hf_tensors(InMemoryWeights(section, model.state_dict().__getitem__)))
    tied = models.family_of(section).hf.names(section).tied
    original = {file_name(family, name): tensor for name, tensor in hf.state_dict().items()}
    original = {name: tensor for name, tensor in original.items() if name not in tied}
    assert set(exported) == set(original)
    assert all(torch.equal(exported[name], original[name]) for name in original)


@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_modules_have_the_parameters_of_the_blueprint(family: str) -> None:
    section = configs.tiny_config(family).model
    assert isinstance(section, models.family_of(section).config_class)
    blueprint = models.family_of(section).blueprint(section)
    parameters = dict(models.build_model(section).named_parameters())
    assert set(parameters) == set(blueprint.parameter_names())
    assert sum(parameter.numel() for parameter in parameters.values()) == blueprint.parameter_count()
    no_decay = {name for name in parameters if not blueprint.spec(name).weight_decay}
    assert no_decay == {name for name, parameter in parameters.items() if parameter.ndim == 1}


@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_batch_fields_are_the_ones_that_a_forward_pass_needs(family: str) -> None:
    section = configs.tiny_config(family).model
    model, batch = configs.tiny_model(section), configs.tiny_batch(family)
    fields = models.family_of(section).batch_fields
    model({name: batch[name] for name in (*fields, "sample_ids", "rng_key")})
    for name in set(fields) - {"labels", "next_sentence_labels", "attention_mask"}:  # labels are for the loss
        with pytest.raises(KeyError, match=name):
            model({field: value for field, value in batch.items() if field != name})


TRANSFORMERS_4 = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA31,
    "transformers_version": "4.44.0",
}


def test_config_json_of_transformers_4_and_5_agree(tmp_path: Path) -> None:
    changed = ("rope_theta", "rope_scaling", "torch_dtype")
    transformers_5 = {key: value for key, value in TRANSFORMERS_4.items() if key not in changed}
    transformers_5 |= {"dtype": "bfloat16", "rope_parameters": {**LLAMA31, "rope_theta": 500000.0}}
    assert config_from_hf(TRANSFORMERS_4) == config_from_hf(transformers_5)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TRANSFORMERS_4))
    assert config_from_hf(path) == config_from_hf(tmp_path) == config_from_hf(transformers_5)


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "config_json").glob("*.json")), ids=lambda p: p.stem)
def test_config_json_of_transformers_4_equals_that_of_the_installed_version(path: Path) -> None:
    """transformers 4.57.6 wrote these files; the installed version writes the same model in its own way."""
    assert config_from_hf(path) == config_from_hf(hf_reference(path.stem)[2])


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_json_round_trip(variant: str) -> None:
    _, _, hf_config = hf_reference(variant)
    section = config_from_hf(hf_config)
    assert config_from_hf(config_to_hf(section)) == section


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type=mamba"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"hidden_act": "quick_gelu"}, "hidden_act=quick_gelu: not supported; one of silu, "),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "rope_type=mrope"),
        ({"rope_scaling": {**LLAMA31, "mrope_section": [2, 2, 2]}}, "mrope_section=.* not known for RoPE"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "config.json: factor: missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}, "rope_scaling": None}, "partial_rotary_factor=0.5: not"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: not supported"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 5}}, "long_factor: a list of 5; nearest: 6, half of 12"),
        ({"num_attention_heads": 5}, "heads=5"),
        ({"logit_scale": 0.5}, "logit_scale=0.5: not known for llama, and may change"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "layer_types=sliding_attention"),
    ],
)
def test_unsupported_options_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_from_hf({**TRANSFORMERS_4, **change})


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("gemma", {"hidden_act": "silu"}, "hidden_act=silu: not supported; nearest: gelu_pytorch_tanh"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm=True: not supported"),
        ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings=True: not supported"),
        ("gpt_neox", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: not known"),
        ("falcon", {"alibi": True}, "alibi=True: not supported; nearest: False"),
        (
            "falcon-40b",
            {"parallel_attn": False},
            "parallel_attn=False: not in the new decoder architecture",
        ),
        (
            "falcon",
            {"num_ln_in_parallel_attn": 2},
            "num_ln_in_parallel_attn=2: not supported; nearest: 1",
        ),
        ("opt", {"word_embed_proj_dim": 24}, "word_embed_proj_dim=24: not supported; nearest: 48"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False: not supported; nearest: True"),
    ],
)
def test_options_of_one_family_are_refused(variant: str, change: dict[str, Any], message: str) -> None:
    _, _, hf_config = hf_reference(variant)
    with pytest.raises(UserError, match=f"config.json: {message}"):
        config_from_hf({**hf_config, **change})
