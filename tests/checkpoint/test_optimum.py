"""Shards as optimum-neuron leaves them give back, bit for bit, the weights that plain torch code cut them from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.test_megatron import Parts, as_xser, random_parts
from tests.support import configs
from trainyard.checkpoint.formats.optimum import find_optimum, open_optimum
from trainyard.checkpoint.formats.tensor_map import WeightSource
from trainyard.config.hf_config import to_hf
from trainyard.config.model_schema import LlamaConfig
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorSlice

LLAMA = LlamaConfig(**{**configs.LLAMA, "heads": 8, "kv_heads": 2, "layers": 4, "vocab": 256, "head_dim": 4})
MANY = LLAMA.model_copy(update={"kv_heads": 8})


def regrouped(matrix: Tensor, model: LlamaConfig, times: int) -> Tensor:
    """Rows of query heads, ordered so that each of the `times` rounds of kv heads has its share of every group."""
    return matrix.unflatten(0, (model.num_kv_heads, times, -1)).transpose(0, 1).flatten(0, 2)


def layer_of(model: LlamaConfig, parts: Parts, layer: int, tp: int, rank: int, times: int, fuse: bool) -> Parts:
    own = {name.removeprefix(f"layers.{layer}."): part for name, part in parts.items()}
    q = regrouped(own["attention.q.weight"], model, times).chunk(tp)[rank]
    k, v = (own[f"attention.{x}.weight"].repeat(times, 1).chunk(tp)[rank] for x in "kv")
    o = regrouped(own["attention.output.weight"].T, model, times).chunk(tp)[rank].T
    gqa = model.num_kv_heads < tp or model.num_kv_heads % tp != 0
    if gqa and fuse:
        held = {"qkv_proj.weight_qkv": torch.cat([q, k, v])}
    elif gqa:
        held = {"qkv_proj.weight_q": q, "qkv_proj.weight_k": k, "qkv_proj.weight_v": v}
    elif fuse and model.num_kv_heads == model.heads:
        held = {"qkv_proj.weight": torch.cat([q, k, v])}
    else:
        held = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v}
    gate_up = [own[f"mlp.{x}.weight"].chunk(tp)[rank] for x in ("gate", "up")]
    return {
        **{f"self_attn.{name}": tensor for name, tensor in held.items()},
        "self_attn.o_proj.weight": o,
        "mlp.gate_up_proj.weight": torch.cat(gate_up),
        "mlp.down_proj.weight": own["mlp.down.weight"].chunk(tp, 1)[rank],
        "input_layernorm.weight": own["attention_norm.weight"],
        "post_attention_layernorm.weight": own["mlp_norm.weight"],
    }


def specs_of(model: LlamaConfig, layer: int, tp: int, times: int, fuse: bool) -> list[dict[str, Any]]:
    def linears(fused: str, names: list[str], size: int) -> tuple[str, dict[str, Any]]:
        facts = {"fused_linear_name": fused, "linear_names": names, "bias": False, "fuse_axis": 0, "tp_size": tp}
        return "FusedLinearsSpec", {**facts, "original_dims": [size] * len(names), "peft_type": None}

    attention: list[tuple[str, dict[str, Any]]] = []
    if model.num_kv_heads < tp or model.num_kv_heads % tp != 0:
        names = {"gqa_qkv_projection_name": "qkv_proj", "output_projection_name": "o_proj"}
        names |= {f"{x}_projection_name": f"{x[0]}_proj" for x in ("query", "key", "value")}
        sizes = {
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.num_kv_heads,
            "kv_size_multiplier": times,
        }
        sizes |= {"q_output_size_per_partition": model.heads * 4 // tp}
        sizes |= {"kv_output_size_per_partition": model.num_kv_heads * times * 4 // tp, "tp_size": tp}
        other = {"fuse_qkv": fuse, "bias": False, "peft_type": None}
        attention = [("GQAQKVColumnParallelLinearSpec", {**names, **sizes, **other})]
    elif fuse and model.num_kv_heads == model.heads:
        attention = [linears("qkv_proj", ["q_proj", "k_proj", "v_proj"], model.heads * 4)]
    mlp = [linears("gate_up_proj", ["gate_proj", "up_proj"], model.ffn)]
    prefix = f"model.layers.{layer}."
    return [
        {"module_fully_qualified_name": f"{prefix}self_attn", "specs": attention},
        {"module_fully_qualified_name": f"{prefix}mlp", "specs": mlp},
    ]


def write(
    out: Path, model: LlamaConfig, parts: Parts, tp: int = 1, pp: int = 1, times: int = 1, fuse: bool = False
) -> Path:
    shards = out / "shards"
    (shards / "model").mkdir(parents=True)
    for marker in ("checkpoint", "done"):
        (shards / marker).write_text("1")
    (out / "config.json").write_text(json.dumps(to_hf(model)))
    for stage in range(pp):
        layers = range(stage * model.layers // pp, (stage + 1) * model.layers // pp)
        for rank in range(tp):
            held = {"model.embed_tokens.weight": parts["embedding.weight"].chunk(tp)[rank]} if stage == 0 else {}
            for layer in layers:
                own = layer_of(model, parts, layer, tp, rank, times, fuse)
                held |= {f"model.layers.{layer}.{name}": tensor for name, tensor in own.items()}
            if stage == pp - 1:
                head = parts["embedding.weight" if model.tie_embeddings else "output.weight"].chunk(tp)[rank]
                held |= {"model.norm.weight": parts["norm.weight"], "lm_head.weight": head}
            state = {name: tensor.clone() for name, tensor in held.items()}
            torch.save(state, shards / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt")
        specs = [each for layer in layers for each in specs_of(model, layer, tp, times, fuse)]
        parameters = {name: {"tensor_model_parallel": False} for name in held}
        metadata = {"parameters": parameters, "model_weight_transformation_specs": specs}
        (shards / f"mp_metadata_pp_rank_{stage}.json").write_text(json.dumps(metadata, indent=4))
    return out


def assert_gives(weights: WeightSource, parts: Parts) -> None:
    for name, part in parts.items():
        assert weights.dtype(name) == part.dtype
        assert torch.equal(weights.read(TensorSlice.full(name, tuple(part.shape))), part), name


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(
    ("model", "tp", "times"), [(LLAMA, 1, 1), (LLAMA, 2, 1), (LLAMA, 4, 2), (LLAMA, 8, 4), (LLAMA, 4, 4), (MANY, 4, 1)]
)
def test_shards_come_back_bit_for_bit(
    model: LlamaConfig, tp: int, times: int, pp: int, fuse: bool, tmp_path: Path
) -> None:
    parts = random_parts(model, torch.bfloat16)
    weights = open_optimum(write(tmp_path, model, parts, tp, pp, times, fuse))
    assert weights.model == model
    assert_gives(weights, parts)


def test_tied_and_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA.model_copy(update={"tie_embeddings": True})
    parts = random_parts(model)
    out = write(tmp_path, model, parts, tp=4, times=2)
    for path in (out / "shards" / "model").glob("*.pt"):
        as_xser(path, monkeypatch)
    assert_gives(open_optimum(out), parts)


def test_any_of_its_paths_finds_it(tmp_path: Path) -> None:
    out = write(tmp_path / "out", LLAMA, random_parts(LLAMA), pp=2)
    shards = out / "shards"
    found = find_optimum(out)
    assert found
    assert (found.config, [path.name[-6:] for path in found.metadata]) == (out / "config.json", ["0.json", "1.json"])
    file = shards / "model" / "dp_rank_00_tp_rank_00_pp_rank_01.pt"
    assert all(find_optimum(path) == found for path in (str(shards), shards / "model", file, found.metadata[1]))
    assert find_optimum(tmp_path) is None
    (shards / "mp_metadata_pp_rank_0.json").unlink()
    (shards / "mp_metadata_pp_rank_1.json").unlink()
    assert find_optimum(out) is None  # plain NxD then


@pytest.mark.parametrize("held", [{"gqa_qkv_metadata": {"fuse_qkv": None}}, {"odd": Path("class")}])
def test_notes_of_older_versions_are_not_needed(held: dict[str, Any], tmp_path: Path) -> None:
    parts = random_parts(LLAMA)
    out = write(tmp_path, LLAMA, parts, tp=4, times=2)
    (out / "shards" / "mp_metadata_pp_rank_0.json").unlink()
    torch.save(held, out / "shards" / "mp_metadata_pp_rank_0.pt")
    assert_gives(open_optimum(out), parts)


def test_what_does_not_do_is_one_line(tmp_path: Path) -> None:
    out = write(tmp_path, LLAMA, random_parts(LLAMA), tp=4, times=2)
    note = out / "shards" / "mp_metadata_pp_rank_0.json"
    whole = note.read_text()

    def one_line(words: str, path: Path = out, **changes: Any) -> None:
        with pytest.raises(UserError, match=words) as caught:
            open_optimum(path, **changes)
        assert "\n" not in str(caught.value)

    def changed(words: str, theirs: str, other: str) -> None:
        assert theirs in whole
        note.write_text(whole.replace(theirs, other))
        one_line(words)
        note.write_text(whole)

    changed("has lora adapters", '"peft_type": null', '"peft_type": "lora"')
    changed("has biases", '"bias": false', '"bias": true')
    changed("OtherSpec of model.layers.0.mlp: not known", "FusedLinearsSpec", "OtherSpec")
    changed("fuses up_proj, gate_proj to gate_up_proj", *_swapped(whole))
    changed("num_attention_heads=16, but the model has 8", '"num_attention_heads": 8', '"num_attention_heads": 16')
    changed("says kv_multiplier=4, but the files in .* have 2", '"kv_size_multiplier": 2', '"kv_size_multiplier": 4')
    changed("says qkv=fused, but .* have qkv_linear", '"fuse_qkv": false', '"fuse_qkv": true')
    changed("says tp=2, but .* have 4", '"tp_size": 4', '"tp_size": 2')
    changed("not optimum-neuron's metadata: KeyError 'specs'", '"specs"', '"others"')
    for broken in (whole[:100], "", "[1]"):
        note.write_text(broken)
        one_line("not readable JSON|not optimum-neuron's metadata")
    note.write_text(whole)
    one_line("no optimum-neuron checkpoint", tmp_path / "nothing")
    one_line("num_attention_heads=8, but the model has 4", model=configs.tiny_config("gpt").model)
    (out / "config.json").unlink()
    one_line("no config.json beside or above it")
    file = out / "shards" / "model" / "dp_rank_00_tp_rank_02_pp_rank_00.pt"
    file.write_bytes(file.read_bytes()[:1000])
    one_line(str(file), model=LLAMA)
    file.unlink()
    one_line("tp_rank_02_pp_rank_00", model=LLAMA)


def _swapped(text: str) -> tuple[str, str]:
    """The list of gate and up as it is in the text, and the other way round."""
    start = text.index("[", text.index('"linear_names"'))
    there = text[start : text.index("]", start)]
    other = there.replace("gate_proj", "?").replace("up_proj", "gate_proj").replace("?", "up_proj")
    return there, other
