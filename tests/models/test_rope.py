"""Tables and rotations of RoPE against those of transformers, for each kind and around the trained context."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.support.hf_reference import LLAMA31, LONGROPE
from trainyard.families.hf_config import from_hf, to_hf
from trainyard.families.model_config import first_model_difference
from trainyard.families.rope import QueryScale, Rope, read_rope
from trainyard.kernels.reference import Kernels, apply_rope
from trainyard.models.layers import PositionTables
from trainyard.models.layers.rope import rope_frequencies

CONTEXT = 32
SIZES = {"hidden_size": 48, "num_attention_heads": 4, "vocab_size": 97, "intermediate_size": 80}
SIZES |= {"num_hidden_layers": 2, "max_position_embeddings": 128, "model_type": "llama"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {**LLAMA31, "rope_theta": 500000.0},
    "yarn": YARN,
    "yarn betas": {**YARN, "beta_fast": 4, "beta_slow": 0.5, "rope_theta": 1e6},
    "yarn betas of zero": {**YARN, "beta_fast": 0, "beta_slow": None},
    "yarn attention factor": {**YARN, "attention_factor": 1.25},
    "yarn mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn mscale alone": {**YARN, "mscale": 0.707},
    "yarn not truncated": {**YARN, "truncate": False},
    "yarn truncate null": {**YARN, "truncate": None},
    "yarn without factor": {**YARN, "factor": None},
    "yarn without context": {"rope_type": "yarn", "factor": 2.0},
    "longrope": LONGROPE,
    "longrope factor": {**LONGROPE, "factor": 2.0, "rope_theta": 500.0},
    "longrope factor below 1": {**LONGROPE, "factor": 0.5},
    "longrope attention factor": {**LONGROPE, "attention_factor": 1.5},
    "keys of another kind": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0, "short_factor": [1.0]},
}


def config_json(kind: str) -> dict[str, Any]:
    """`kind` in the keys of transformers 5; the trained context of dynamic scaling is max_position_embeddings."""
    data = {**SIZES, "rope_parameters": dict(KINDS[kind])}
    return data | ({"max_position_embeddings": CONTEXT} if kind == "dynamic" else {})


def our_rope(kind: str) -> Rope:
    section: Any = from_hf(config_json(kind))
    return section.rope_of(0)


def hf_config(kind: str) -> LlamaConfig:
    return LlamaConfig.from_dict(config_json(kind))


@pytest.mark.parametrize("length", [5, CONTEXT, CONTEXT + 1, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_of_sequences(kind: str, length: int) -> None:
    """A forward pass over a sequence, in a model that has seen no other."""
    position = torch.arange(length)
    expected = LlamaRotaryEmbedding(hf_config(kind))(torch.zeros(1), position[None])
    tables = PositionTables([our_rope(kind)], Kernels())
    for by_row in (False, True):
        given = torch.full((1, 1, 1), length) if by_row else length
        ((cos, sin, scale),) = tables(position[None, None] if by_row else position, given)
        assert scale is None
        for actual, reference in zip((cos, sin), expected, strict=True):
            torch.testing.assert_close(actual.view_as(reference), reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "default"])
def test_frequencies_and_attention_factor(kind: str) -> None:
    """Of a model that was just made: the first row are the frequencies of short sequences."""
    config = hf_config(kind)
    frequency, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config)
    rope = our_rope(kind)
    torch.testing.assert_close(rope_frequencies(rope)[0], torch.cat([frequency] * 2), rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("factor", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_partial_frequencies(kind: str, factor: float) -> None:
    data = config_json(kind) | {"hidden_size": 160}
    data["rope_parameters"]["partial_rotary_factor"] = factor
    config = LlamaConfig.from_dict(data)
    expected, _ = ROPE_INIT_FUNCTIONS[kind](config)
    full = our_rope(kind)
    rope = Rope(full.theta, int(40 * factor), full.max_positions, full.scaling)
    torch.testing.assert_close(rope_frequencies(rope)[0, : rope.pairs], expected, rtol=1e-6, atol=0)
    found = read_rope(data, rotary_factor=1.0)
    assert found["partial_rotary_factor"] == factor
    assert read_rope({**data, "rope_parameters": {}, "partial_rotary_factor": 0.4}, 1.0)["partial_rotary_factor"] == 0.4
    assert read_rope({**data, "rope_parameters": {}}, 0.3)["partial_rotary_factor"] == 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_written_config_is_read_by_both(kind: str) -> None:
    """transformers gets the same tables from config.json as we write it, in its keys of 4 and of 5."""
    section: Any = from_hf(config_json(kind))
    written = to_hf(section)
    assert first_model_difference(from_hf(written), section) is None
    expected = LlamaRotaryEmbedding(hf_config(kind))
    for keys in (("rope_parameters",), ("rope_scaling", "rope_theta")):
        data = {key: value for key, value in written.items() if key not in keys}
        assert first_model_difference(from_hf(data), section) is None
        actual = LlamaRotaryEmbedding(LlamaConfig.from_dict(data))
        torch.testing.assert_close(actual.inv_freq, expected.inv_freq, rtol=1e-6, atol=0)
        assert actual.attention_scaling == pytest.approx(expected.attention_scaling)


def test_trained_context_beside_rope_parameters() -> None:
    """transformers prefers what stands beside them, as in files of Phi-3, when it makes the model."""
    data = {**config_json("yarn"), "original_max_position_embeddings": 16}
    expected = LlamaRotaryEmbedding(LlamaConfig.from_dict(data)).inv_freq
    section: Any = from_hf(data)
    torch.testing.assert_close(rope_frequencies(section.rope_of(0))[0, :6], expected, rtol=1e-6, atol=0)


def angles(size: int, tokens: int = 7) -> Tensor:
    return torch.rand(1, tokens, size // 2) * 6


@pytest.mark.parametrize(
    ("model", "size", "interleaved"),
    [
        ("llama", 24, False),
        ("phi3", 24, False),
        ("phi3", 16, False),
        ("glm4", 24, True),
        ("glm4", 12, True),
        ("cohere", 24, True),
    ],
)
def test_rotation(model: str, size: int, interleaved: bool) -> None:
    """Rotated queries, dim by dim; those that do not rotate pass."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    q, k, angle = torch.randn(2, 4, 7, 24), torch.randn(2, 2, 7, 24), angles(size)
    both = torch.cat((angle, angle), -1)
    pairs = angle.repeat_interleave(2, -1)
    theirs = pairs if model == "cohere" else both  # GLM-4 makes pairs itself
    expected = module.apply_rotary_pos_emb(q, k, theirs.cos(), theirs.sin())
    ours = pairs if interleaved else both
    for x, y in zip((q, k), expected, strict=True):
        torch.testing.assert_close(apply_rope(x, ours.cos()[0], ours.sin()[0], interleaved), y, rtol=0, atol=1e-6)


def test_complex_rotation_is_that_of_pairs() -> None:
    """Llama 4 and DeepSeek-V2."""
    from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

    q, k, angle = torch.randn(2, 7, 4, 24), torch.randn(2, 7, 2, 24), angles(24)
    expected = apply_rotary_emb(q, k, torch.polar(torch.ones_like(angle), angle))
    pairs = angle.repeat_interleave(2, -1)[0]
    for x, y in zip((q, k), expected, strict=True):
        rotated = apply_rope(x.transpose(1, 2), pairs.cos(), pairs.sin(), interleaved=True)
        torch.testing.assert_close(rotated.transpose(1, 2), y, rtol=0, atol=1e-6)


def test_permuted_rotation_has_the_scores_of_pairs() -> None:
    """DeepSeek-V3 moves the dims of a head before it rotates halves, which no score shows."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    q, k, angle = torch.randn(2, 4, 7, 24), torch.randn(2, 4, 7, 24), angles(24)
    both, pairs = torch.cat((angle, angle), -1), angle.repeat_interleave(2, -1)[0]
    their_q, their_k = apply_rotary_pos_emb_interleave(q, k, both.cos(), both.sin())
    our_q, our_k = (apply_rope(x, pairs.cos(), pairs.sin(), interleaved=True) for x in (q, k))
    torch.testing.assert_close(our_q @ our_k.mT, their_q @ their_k.mT, rtol=1e-5, atol=1e-5)


def test_layers_share_tables_and_scale_queries() -> None:
    """As in Llama 4: layers without rotation scale their queries."""
    first, scaled = Rope(1e4, 8, 64), Rope(1e4, 0, 64, query_scale=QueryScale(interval=4.0, weight=0.1))
    tables = PositionTables([first, None, scaled], Kernels())(torch.arange(9), 9)
    assert tables[0].cos is not None
    assert tables[1] == (None, None, None)
    position = torch.arange(9).float()
    expected = torch.log1p(torch.floor((position + 1.0) / 4.0)) * 0.1 + 1.0  # Llama4TextAttention.forward
    assert tables[2].cos is None
    assert tables[2].query_scale is not None
    torch.testing.assert_close(tables[2].query_scale[:, 0], expected)
