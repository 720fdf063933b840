"""Layers of several kinds: a family whose blueprint has rows for some layers only, from initial weights to the plan."""

import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import configs
from tests.support.two_kinds import FAMILY, TWO_KINDS, TwoKindsConfig
from trainyard import models
from trainyard.checkpoint.partition import rank_slices
from trainyard.checkpoint.weights import unfused_tensors
from trainyard.core.errors import UserError
from trainyard.core.splits import ModelShard
from trainyard.families import Family, find_family, registry
from trainyard.families.blueprint import for_layers, parse_layers
from trainyard.families.flops import flops_per_sample, layer_flops
from trainyard.formats.hf import InMemoryWeights, open_hf, stored_tensors, write_hf
from trainyard.formats.tensor_map import check_all_stored
from trainyard.models import rank_model
from trainyard.models.init import initial_values
from trainyard.models.mlp import LlamaMLP
from trainyard.models.moe import MoeMLP
from trainyard.parallel.layout import Layout

MODEL = configs.tiny_config(TWO_KINDS).model
BLUEPRINT = FAMILY.blueprint(MODEL)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("0-2", [0, 1, 2]),
        ("3-", [3, 4, 5, 6]),
        ("even", [0, 2, 4, 6]),
        ("odd", [1, 3, 5]),
        ("1,5, 6", [1, 5, 6]),
        ("0,5-", [0, 5, 6]),
    ],
)
def test_layers_from_text(text: str, layers: list[int]) -> None:
    assert sorted(parse_layers(text, 7)) == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("first two", "'first two': not a set of layers; write for example 0-2, 3-, even, odd or 0,5-7"),
        ("-3", "'-3': not a set of layers"),
        ("", "'': not a set of layers"),
        ("2-9", "'2-9': the model's 7 layers are 0 to 6"),
        ("3-1", "'3-1': the model's 7 layers are 0 to 6"),
    ],
)
def test_text_that_names_no_layers(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_layers(text, 7)


def test_a_layer_has_the_parameters_of_its_rows() -> None:
    names = set(BLUEPRINT.parameter_names())
    assert {layer for layer in range(4) if f"layers.{layer}.mlp.router.weight" in names} == {2, 3}
    assert {layer for layer in range(4) if f"layers.{layer}.mlp.down.weight" in names} == {0, 1}
    assert all(name in BLUEPRINT for name in names)
    assert "layers.0.mlp.router.weight" not in BLUEPRINT
    with pytest.raises(KeyError):
        BLUEPRINT.spec("layers.2.mlp.down.weight")
    assert BLUEPRINT.parameter_count() == sum(np.prod(BLUEPRINT.spec(name).shape) for name in names)


def test_rows_of_one_name_may_have_other_shapes_in_other_layers() -> None:
    narrow, wide = (FAMILY.blueprint(MODEL.model_copy(update={"dense_ffn": size})) for size in (80, 112))
    dense = [spec for spec in wide.specs if spec.layers == frozenset({0, 1})]
    table = replace(narrow, specs=(*narrow.specs, *for_layers({2, 3}, dense)))
    shapes = [table.spec(f"layers.{layer}.mlp.down.weight").shape for layer in range(4)]
    assert shapes == [(32, 80), (32, 80), (32, 112), (32, 112)]


def test_the_module_of_a_layer_is_that_of_its_rows() -> None:
    layers = models.build_model(MODEL).layers
    assert [type(block.mlp) for block in layers.values()] == [LlamaMLP, LlamaMLP, MoeMLP, MoeMLP]  # type: ignore[union-attr]
    assert [block.attention.core_attention.window for block in layers.values()] == [None, 8, None, 8]  # type: ignore[union-attr]


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 2), (1, 4)])
def test_initial_weights_are_those_of_one_rank(tp: int, ep: int) -> None:
    full = {name: np.full(tensor.sizes, np.nan) for name, tensor in unfused_tensors(MODEL).items()}
    one = {name: value.copy() for name, value in full.items()}
    for tensors, sizes in ((full, (tp, ep)), (one, (1, 1))):
        for rank in range(sizes[0] * sizes[1]):
            shard = ModelShard(sizes[0], rank % sizes[0], sizes[1], rank // sizes[0])
            values = initial_values(BLUEPRINT, 3, shard=shard)
            for name in BLUEPRINT.parameter_names():
                local = values(name).numpy()
                for piece in rank_slices(BLUEPRINT, name, shard, range(len(local)), skip_replicas=False):
                    tensors[piece.name][piece.to_index()] = local[piece.local_index]
    assert all(np.array_equal(full[name], one[name]) for name in one)


def test_logits_follow_the_windows_and_the_experts() -> None:
    """A token beyond the window of every layer changes nothing; without windows it does."""
    batch = configs.tiny_batch("llama")
    changed = {**batch, "tokens": batch["tokens"].clone()}
    changed["tokens"][:, 0] = (changed["tokens"][:, 0] + 1) % 97
    for layers, is_seen in (("0-", False), ("odd", True)):
        section = MODEL.model_copy(update={"window_layers": layers, "window": 4})
        model = configs.tiny_model(section).eval()
        with torch.no_grad():
            last = [model(tokens).logits()[:, -1] for tokens in (batch, changed)]
        assert (not torch.equal(*last)) == is_seen


def test_round_trip_to_a_hugging_face_directory_is_bitwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = metadata.EntryPoint("two_kinds", MODEL.family, registry.FAMILIES.group)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry])
    registry.all_families.cache_clear()
    values = initial_values(BLUEPRINT, 5)
    write_hf(tmp_path / "hf", InMemoryWeights(MODEL, values))
    weights, in_memory = open_hf(tmp_path / "hf"), InMemoryWeights(MODEL, values)
    registry.all_families.cache_clear()
    find_family.cache_clear()
    assert weights.model == MODEL.model_copy(update={"family": "two_kinds", "head_dim": 8, "z_loss": 0.0})
    for piece in unfused_tensors(MODEL).values():
        assert torch.equal(weights.read(piece), in_memory.read(piece))
    names = {stored.name for stored in stored_tensors(MODEL)}
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.2.mlp.gate_proj.weight" not in names
    assert "model.layers.2.mlp.experts.3.down_proj.weight" in names


def test_a_format_that_forgets_a_kind_of_layer_is_refused() -> None:
    tensors = [stored for stored in stored_tensors(MODEL) if "experts" not in stored.name]
    with pytest.raises(UserError, match=r"have none for layers.2.mlp.experts.0.gate.weight, which would be lost"):
        check_all_stored(MODEL, tensors, "its Hugging Face names")


def test_flops_count_each_layer_as_it_is() -> None:
    """With hand-computed matrices: 2 x weights per token, experts by the two of four that a token uses."""
    seq_len, D, heads = 16, 32, 4 * 8
    attention = D * (heads + 2 * 16) + heads * D
    dense, experts = 3 * D * 80, 4 * D + 2 * 3 * D * 48
    full, window = (seq_len + 1) / 2, 8 - 8 * 7 / 2 / seq_len
    matrices = seq_len * 2 * (4 * attention + 2 * dense + 2 * experts + 260 * D)
    pairs = 4 * heads * seq_len
    flops = flops_per_sample(MODEL, BLUEPRINT, seq_len, 0)
    assert flops.full_attention == 3 * (matrices + 4 * pairs * seq_len)
    assert flops.causal_attention == pytest.approx(3 * (matrices + pairs * 2 * (full + window)), rel=1e-12)
    assert layer_flops(MODEL, BLUEPRINT, seq_len) == [
        pytest.approx(seq_len * 2 * (attention + mlp) + pairs * keys, rel=1e-12)
        for mlp, keys in ((dense, full), (dense, window), (experts, full), (experts, window))
    ]


def test_a_pipeline_is_cut_by_the_work_of_layers() -> None:
    """Layers with experts that do ten times the work of dense ones: two dense ones with the first of them."""

    def sizes(pp: int, vpp: int = 1, **model: Any) -> list[int]:
        config = configs.tiny_config(
            {**TWO_KINDS, "layers": 8, **model},
            layout={"pp": pp, "vpp": vpp},
            train={"global_batch": 8, "micro_batch": 1},
        )
        return [len(stage.layers) for stage in Layout.from_config(config, pp).stages]

    heavy = {"dense_layers": "0-3", "ffn": 1600, "dense_ffn": 16, "window_layers": "0-"}
    assert sizes(2, **heavy) == [6, 2]
    assert sizes(4, **heavy) == [5, 1, 1, 1]
    assert sizes(2, 2, **heavy) == [5, 1, 1, 1]
    light = {"dense_layers": "0-3", "ffn": 16, "dense_ffn": 1600, "window_layers": "0-"}
    assert sizes(2, **light) == [2, 6]


def test_tensor_parallel_ranks_must_divide_every_mlp() -> None:
    config = configs.tiny_config({**TWO_KINDS, "dense_ffn": 81}, layout={"tp": 2})
    with pytest.raises(UserError, match=r"layout.tp=2: does not divide model.dense_ffn=81"):
        Layout.from_config(config, 2)


def test_layers_of_one_kind_must_have_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneKind(TwoKindsConfig):
        def layer_kind(self, layer: int) -> int:
            return 0

    family: Family = replace(find_family(MODEL.family), config_class=OneKind)
    monkeypatch.setattr(rank_model, "family_of", lambda c: family)
    section = OneKind.model_validate({**TWO_KINDS})
    with pytest.raises(UserError, match="layers 0 and 2 are of one kind, but have other rows in its blueprint"):
        models.build_model(section)
