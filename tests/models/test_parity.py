"""Logits, loss and every gradient agree with transformers, for each family and variant, through the name map."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.support import configs
from trainyard import models
from trainyard.checkpoint.formats.hf import InMemoryWeights, hf_tensors, weights_from_tensors
from trainyard.checkpoint.formats.tensor_map import tp_rank_values
from trainyard.config.hf_config import from_hf as config_from_hf
from trainyard.config.hf_config import to_hf as config_to_hf
from trainyard.train.losses import BertLoss, CausalLoss

LLAMA = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
GPT = {
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT |= {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
BERT = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-gqa": ("llama", {"num_key_value_heads": 2}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 20, "num_key_value_heads": 2}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-3.1": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA31, "num_key_value_heads": 2}),
    "deepseek-linear": ("llama", {"rope_theta": 100000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "gpt2": ("gpt", {}),
    "gpt2-untied": ("gpt", {"tie_word_embeddings": False}),
    "gpt2-inner-gelu": ("gpt", {"n_inner": 100, "activation_function": "gelu"}),
    "bert": ("bert", {}),
    "bert-gelu-new": ("bert", {"hidden_act": "gelu_new"}),
}
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, LLAMA),
    "gpt": (transformers.GPT2Config, transformers.GPT2LMHeadModel, GPT),
    "bert": (transformers.BertConfig, transformers.BertForPreTraining, BERT),
}


def reference(variant: str) -> tuple[str, nn.Module, dict[str, Any]]:
    """A random transformers model and the config.json it writes."""
    family, changes = VARIANTS[variant]
    config_class, model_class, base = CLASSES[family]
    config = config_class(**{**base, **changes})
    torch.manual_seed(1)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms away from their constants
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return family, model.eval(), json.loads(config.to_json_string())


def ours(hf: nn.Module, hf_config: dict[str, Any], **changes: Any) -> tuple[Any, nn.Module]:
    section = config_from_hf(hf_config).model_copy(update=changes)
    state = hf.state_dict()
    values = tp_rank_values(weights_from_tensors(section, state))
    return section, models.fill_parameters(models.build_model(section), lambda name: values(name).clone())


def batch_for(family: str) -> dict[str, Tensor]:
    torch.manual_seed(2)
    tokens = torch.randint(1, 97, (3, 24), dtype=torch.int32)  # 0 is padding to transformers' BERT
    batch = {
        "tokens": tokens,
        "sample_ids": torch.arange(3, dtype=torch.int32),
        "rng_key": torch.zeros(2, dtype=torch.int32),
    }
    if family != "bert":
        labels = torch.randint(0, 97, (3, 24), dtype=torch.int32)
        labels[0, :5] = -100
        return batch | {"labels": labels}
    places = torch.stack([torch.randperm(20)[:6] for _ in range(3)]).int()
    labels = torch.randint(0, 97, (3, 6), dtype=torch.int32)
    labels[1, 4:] = -100
    mask = torch.ones(3, 24, dtype=torch.int32)
    mask[2, 20:] = 0
    tokens[2, 20:] = 0
    segments = (torch.arange(24) > 10).int().expand(3, 24).contiguous()
    return batch | {
        "masked_positions": places,
        "labels": labels,
        "attention_mask": mask,
        "segment_ids": segments,
        "next_sentence_labels": torch.tensor([0, 1, 1]),
    }


def reference_forward(family: str, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits where ours has them, and the loss in transformers' own words."""
    tokens = batch["tokens"].long()
    cross_entropy = nn.functional.cross_entropy
    if family != "bert":
        logits = model(input_ids=tokens).logits
        return logits, cross_entropy(logits.flatten(0, 1), batch["labels"].long().flatten(), ignore_index=-100)
    full = torch.full((3, 24), -100)
    for row in range(3):
        for place, label in zip(batch["masked_positions"][row].tolist(), batch["labels"][row].tolist(), strict=True):
            full[row, place] = label
    out = model(
        input_ids=tokens,
        attention_mask=batch["attention_mask"].long(),
        token_type_ids=batch["segment_ids"].long(),
        labels=full,
        next_sentence_label=batch["next_sentence_labels"],
    )
    places = batch["masked_positions"].long().unsqueeze(-1).expand(-1, -1, out.prediction_logits.shape[-1])
    return out.prediction_logits.gather(1, places), out.loss


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_and_gradients(variant: str, fused: bool) -> None:
    family, hf, hf_config = reference(variant)
    changes = {"fuse_qkv": fused, **({"fuse_gate_up": fused} if family == "llama" else {})}
    section, model = ours(hf, hf_config, **changes)
    batch = batch_for(family)
    logits, loss = reference_forward(family, hf, batch)
    output = model(batch)
    torch.testing.assert_close(output.logits(), logits, atol=1e-5, rtol=1e-5)
    terms = (BertLoss() if family == "bert" else CausalLoss()).terms(output, batch)
    own = sum(total / count for total, count in terms.values())
    torch.testing.assert_close(own, loss, atol=1e-5, rtol=1e-5)
    own.backward()
    loss.backward()
    gradients = dict(model.named_parameters())
    mapped = dict(hf_tensors(InMemoryWeights(section, lambda name: gradients[name].grad)))
    wanted = {name: parameter.grad for name, parameter in hf.named_parameters()}
    assert set(mapped) == set(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(
            mapped[name], gradient, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_names_round_trip_bit_exact(variant: str, fused: bool) -> None:
    _, hf, hf_config = reference(variant)
    section, model = ours(hf, hf_config, fuse_qkv=fused)
    kind = models.family_of(section)
    state = model.state_dict()
    back = dict(hf_tensors(InMemoryWeights(section, state.__getitem__)))
    ties = kind.hf_names(section).tied
    original = {name: tensor for name, tensor in hf.state_dict().items() if name not in ties}
    assert set(back) == set(original)
    assert all(torch.equal(back[name], original[name]) for name in original)


@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_parameters_are_the_blueprints(family: str) -> None:
    section = configs.tiny_config(family).model
    blueprint = models.family_of(section).blueprint(section)
    parameters = dict(models.build_model(section).named_parameters())
    assert set(parameters) == set(blueprint.parameter_names())
    assert sum(parameter.numel() for parameter in parameters.values()) == blueprint.parameter_count()
    no_decay = {name for name in parameters if not blueprint.spec(name).weight_decay}
    assert no_decay == {name for name, parameter in parameters.items() if parameter.ndim == 1}


VERSION_4 = {
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
    five = {key: value for key, value in VERSION_4.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    five |= {"dtype": "bfloat16", "rope_parameters": {**LLAMA31, "rope_theta": 500000.0}}
    assert config_from_hf(VERSION_4) == config_from_hf(five)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(VERSION_4))
    assert config_from_hf(path) == config_from_hf(tmp_path) == config_from_hf(five)


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "config_json").glob("*.json")), ids=lambda p: p.stem)
def test_files_written_by_transformers_4_read_like_those_of_today(path: Path) -> None:
    """The files were written by transformers 4.57.6; the installed version writes the same model its own way."""
    assert config_from_hf(path) == config_from_hf(reference(path.stem)[2])


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_json_round_trip(variant: str) -> None:
    _, _, hf_config = reference(variant)
    section = config_from_hf(hf_config)
    assert config_from_hf(config_to_hf(section)) == section


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "model_type=mamba"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn"),
        ({"num_attention_heads": 5}, "heads=5"),
    ],
)
def test_what_we_do_not_have_is_refused(change: dict[str, Any], words: str) -> None:
    from trainyard.core.errors import UserError

    with pytest.raises(UserError, match=words):
        config_from_hf({**VERSION_4, **change})
