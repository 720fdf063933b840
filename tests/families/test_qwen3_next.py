"""Qwen3-Next: files of transformers, long and packed samples, FLOP counts, and what is refused."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3NextForCausalLM

from tests.models.test_parity import model_from_hf
from tests.support import configs
from tests.support.hf_reference import hf_model, hf_reference
from trainyard import models
from trainyard.config.schema import RecomputeSection
from trainyard.core.errors import UserError
from trainyard.core.splits import ModelShard
from trainyard.families import blueprint_of
from trainyard.families.flops import flops_per_sample, layer_flops
from trainyard.families.hf_config import from_hf, to_hf
from trainyard.families.model_config import first_model_difference
from trainyard.formats.hf import open_hf, write_hf
from trainyard.kernels.gated_delta import gated_delta_step
from trainyard.models.init import initial_values
from trainyard.parallel.layout import Layout
from trainyard.parallel.recompute import apply_recompute
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.trace.work_trace import TRACED_DEVICE, trace_work

PUBLISHED = json.loads((Path(__file__).parent / "qwen3_next_80b.json").read_text())
"""config.json of Qwen3-Next-80B-A3B, which transformers 4.57 wrote."""


def tiny(**changes: Any) -> tuple[Any, nn.Module, Any]:
    """Our configuration and model, and transformers' with the same weights."""
    _, hf, hf_config = hf_reference("qwen3_next")
    return *model_from_hf(hf, hf_config, **changes), hf


def batch_of(tokens: torch.Tensor, **fields: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.arange(len(tokens), dtype=torch.int32)
    return {"tokens": tokens, "sample_ids": ids, "rng_key": torch.zeros(2, dtype=torch.int32), **fields}


@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_logits_of_samples_of_several_chunks(tokens: int) -> None:
    _, model, hf = tiny()
    ids = torch.randint(0, 97, (2, tokens), dtype=torch.int32)
    with torch.no_grad():
        torch.testing.assert_close(model(batch_of(ids)).logits(), hf(ids.long()).logits, atol=1e-5, rtol=1e-5)


def test_packed_documents_are_computed_apart() -> None:
    """Logits of each document are those that transformers computes of it alone."""
    _, model, hf = tiny()
    ids, ends = torch.randint(0, 97, (1, 100), dtype=torch.int32), (0, 3, 70, 71, 100)
    documents, positions = torch.zeros_like(ids), torch.zeros_like(ids)
    for number, (start, end) in enumerate(pairwise(ends)):
        documents[:, start:end], positions[:, start:end] = number, torch.arange(end - start)
    with torch.no_grad():
        logits = model(batch_of(ids, document_ids=documents, position_ids=positions)).logits()
        alone = [hf(ids[:, start:end].long()).logits for start, end in pairwise(ends)]
    torch.testing.assert_close(logits, torch.cat(alone, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["qwen3_next-experts", "qwen3_next-odd"])
def test_transformers_loads_an_export(variant: str, tmp_path: Path) -> None:
    hf = hf_model(variant)
    hf.save_pretrained(tmp_path / "hf")
    write_hf(tmp_path / "ours", open_hf(tmp_path / "hf"))
    loaded, found = Qwen3NextForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    tokens = torch.randint(0, 97, (2, 30))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, hf(tokens).logits)


def test_layers_of_multi_token_prediction_are_left_out_as_transformers_does(tmp_path: Path) -> None:
    hf_model("qwen3_next-experts").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "mtp.layers.0.mlp.gate.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    weights = open_hf(tmp_path)
    assert weights.model.family == "qwen3_next"
    save_file({**tensors, "mpt.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=re.escape("mpt.weight is not a tensor of this model")):
        open_hf(tmp_path)


def test_the_published_model() -> None:
    c: Any = from_hf(PUBLISHED)
    assert [layer for layer in range(c.layers) if c.recurrence(layer) is None] == [*range(3, 48, 4)]
    assert from_hf(to_hf(c)) == c
    blueprint = blueprint_of(c)
    assert blueprint.parameter_count() == 79_674_391_296
    flops = flops_per_sample(c, blueprint, 8192, 0)
    # 12 layers of attention and not 48: linear layers cost the same at every length.
    assert flops.full_attention - flops.causal_attention == 12 * 3 * 4 * 16 * 256 * (8192**2 - 8192 * 8193 / 2)


def test_flops_of_a_gated_delta_net_are_those_of_its_single_tokens() -> None:
    c: Any = tiny()[0]
    heads, K, V = c.delta_value_heads, c.delta_key_dim, c.delta_value_dim
    q, v, g = torch.randn(1, 2, K), torch.randn(1, heads, V), torch.randn(1, heads)
    with FlopCounterMode(display=False) as counter:
        gated_delta_step(q, q, v, g, g, torch.randn(1, heads, K, V))
    convolution = 2 * c.conv_width * (2 * 2 * K + heads * V)
    assert c.recurrence(0).flops == counter.get_total_flops() + convolution
    delta, attention = layer_flops(c, blueprint_of(c), 50)[:2]
    matrices = c.hidden * (2 * 2 * K + 2 * heads * V + 2 * heads) + heads * V * c.hidden
    mlp = 3 * c.hidden * 80
    assert delta == 50 * (2 * (matrices + mlp) + c.recurrence(0).flops)
    projections = c.hidden * 24 * (2 * 4 + 2 * 2) + 4 * 24 * c.hidden
    assert attention == 50 * 2 * (projections + mlp) + 4 * 4 * 24 * 50 * 51 / 2


def test_a_plan_traces_a_state_and_no_pairs_of_tokens() -> None:
    """Matrix multiplications of the chunks are a little more than what single tokens need, at any length."""
    sizes = {
        "hidden": 256,
        "experts": 4,
        "top_k": 2,
        "layers": 4,
        "vocab": 100,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
    }
    sizes |= {"delta_key_heads": 4, "delta_value_heads": 8}
    model = {**from_hf(PUBLISHED).model_dump(mode="json"), **sizes}
    for seq_len in (256, 512):
        train = {"global_batch": 1, "micro_batch": 1}
        config = configs.tiny_config(model, data={"seq_len": seq_len}, train=train, precision={"kind": "bf16"})
        run = PlannedRun(config, Layout.from_config(config, 1), TRACED_DEVICE)
        work, flops = trace_work(run), layer_flops(config.model, blueprint_of(config.model), seq_len)
        assert not work[0].attention
        assert 1 < work[0].matmul_flops / (3 * flops[0]) < 1.4
        assert sum(work[3].attention.values()) == 2


def test_initial_rates_are_those_of_every_layout() -> None:
    """Logarithms of rates between 0.01 and 16, as in transformers, which ranks have their part of."""
    c: Any = from_hf(PUBLISHED).model_copy(update={"layers": 4, "vocab": 100})
    blueprint = blueprint_of(c)
    full = initial_values(blueprint, 1)("layers.0.attention.log_rate")
    parts = [
        initial_values(blueprint, 1, shard=ModelShard(4, rank))("layers.0.attention.log_rate") for rank in range(4)
    ]
    assert torch.equal(torch.cat(parts), full)
    rates = full.exp()
    assert ((rates > 0.01) & (rates < 16)).all()
    assert 6 < rates.mean() < 10
    assert rates.std() > 3


@pytest.mark.parametrize("kind", ["none", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("attention", "full"))])
def test_blocks_compile_into_one_graph(kind: Any) -> None:
    section, model, _ = tiny()
    apply_recompute(list(model.layers.values()), RecomputeSection(kind=kind), compiled=True)
    batch = batch_of(torch.randint(0, 97, (2, 70), dtype=torch.int32))
    inputs = model.block_inputs(batch)
    for block in (model.layers["0"], model.layers["1"]):
        x = torch.randn(2, 70, section.hidden, requires_grad=True)
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        for ours, plain in zip(*(torch.autograd.grad(f(x, *inputs).sum(), x) for f in (compiled, block)), strict=True):
            torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"cp": 2}, r"layout.cp=2: layer 0 of qwen3_next passes a state .*; nearest on 4 ranks: tp=1 pp=2 cp=1"),
        ({"tp": 4}, r"layout.tp=4: does not divide model.delta_key_heads=2; nearest on 4 ranks: tp=2 pp=1 cp=1"),
    ],
)
def test_layouts_that_are_refused(layout: dict[str, Any], message: str) -> None:
    model = from_hf(hf_reference("qwen3_next")[2]).model_dump(mode="json")
    config = configs.tiny_config({**model, "attention_layers": "1,3"}, layout=layout)
    with pytest.raises(UserError, match=message):
        Layout.from_config(config, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"linear_num_value_heads": 24},
            "delta_value_heads=24: not a multiple of delta_key_heads=16; nearest: 16 or",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types=['full_attention']: not 48 of linear_attention, full_att"),
        ({"layer_types": ["mamba"] * 48}, "layer_types=['mamba', "),
        ({"full_attention_interval": 0}, "full_attention_interval=0: must be 1 or more; nearest: 1"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1: "),
        ({"num_experts": 0}, "num_experts=0: "),
        ({"hidden_act": "gelu"}, "hidden_act=gelu: not supported; nearest: silu"),
    ],
)
def test_files_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        from_hf({**PUBLISHED, **change})


def test_layers_in_other_words_are_the_same_model() -> None:
    """A run whose file says `odd` exports what reads back as `1,3`."""
    models_of = [
        from_hf(hf_reference("qwen3_next")[2]).model_copy(update={"attention_layers": x}) for x in ("odd", "1,3")
    ]
    assert first_model_difference(*models_of) is None
    other = models_of[0].model_copy(update={"attention_layers": "even"})
    assert first_model_difference(models_of[0], other) == ("attention_layers", [1, 3], [0, 2])


def test_a_model_without_attention_is_written_and_read() -> None:
    """`layer_types` may have one kind only; every fourth layer is the default, not a rule."""
    for kinds in (["linear_attention"] * 48, ["full_attention"] * 48):
        c: Any = from_hf({**PUBLISHED, "layer_types": kinds})
        assert to_hf(c)["layer_types"] == kinds
        assert from_hf(to_hf(c)) == c
        assert models.family_of(c).name == "qwen3_next"
