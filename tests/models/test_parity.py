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


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_and_gradients(variant: str, fuse: bool) -> None:
    family, hf, hf_config = hf_reference(variant)
    changes = {"fuse_qkv": fuse, **({"fuse_gate_up": fuse} if family not in ("gpt", "bert") else {})}
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
    expected = {name: parameter.grad for name, parameter in hf.named_parameters()}
    assert set(gradients) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            gradients[name], gradient, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_round_trip_bit_exact(variant: str, fuse: bool) -> None:
    _, hf, hf_config = hf_reference(variant)
    section, model = model_from_hf(hf, hf_config, fuse_qkv=fuse)
    exported = dict(hf_tensors(InMemoryWeights(section, model.state_dict().__getitem__)))
    tied = models.family_of(section).hf.names(section).tied
    original = {name: tensor for name, tensor in hf.state_dict().items() if name not in tied}
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
        ({"hidden_act": "relu2"}, "hidden_act=relu2: not supported; one of silu, "),
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
