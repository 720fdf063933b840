"""Shards of optimum-neuron are read bit for bit as the weights that plain torch code sharded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.formats.test_megatron import UnfusedWeights, as_xser, random_weights
from tests.support import configs
from trainyard.checkpoint.weights import WeightSource
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.builtin.llama import LlamaConfig
from trainyard.families.hf_config import to_hf
from trainyard.formats.optimum import find_optimum, open_optimum

LLAMA = LlamaConfig(**{**configs.LLAMA, "heads": 8, "kv_heads": 2, "layers": 4, "vocab": 256, "head_dim": 4})
MULTI_HEAD = LLAMA.model_copy(update={"kv_heads": 8})


def regrouped(matrix: Tensor, model: LlamaConfig, replicas: int) -> Tensor:
    """Rows of query heads, ordered so that each of the `replicas` rounds of kv heads has its share of every group."""
    return matrix.unflatten(0, (model.num_kv_heads, replicas, -1)).transpose(0, 1).flatten(0, 2)


def layer_shard(
    model: LlamaConfig, unfused: UnfusedWeights, layer: int, tp: int, rank: int, replicas: int, fuse: bool
) -> UnfusedWeights:
    local = {name.removeprefix(f"layers.{layer}."): value for name, value in unfused.items()}
    q = regrouped(local["attention.q.weight"], model, replicas).chunk(tp)[rank]
    k, v = (local[f"attention.{x}.weight"].repeat(replicas, 1).chunk(tp)[rank] for x in "kv")
    o = regrouped(local["attention.output.weight"].T, model, replicas).chunk(tp)[rank].T
    gqa = model.num_kv_heads < tp or model.num_kv_heads % tp != 0
    if gqa and fuse:
        state = {"qkv_proj.weight_qkv": torch.cat([q, k, v])}
    elif gqa:
        state = {"qkv_proj.weight_q": q, "qkv_proj.weight_k": k, "qkv_proj.weight_v": v}
    elif fuse and model.num_kv_heads == model.heads:
        state = {"qkv_proj.weight": torch.cat([q, k, v])}
    else:
        state = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v}
    gate_up = [local[f"mlp.{x}.weight"].chunk(tp)[rank] for x in ("gate", "up")]
    return {
        **{f"self_attn.{name}": tensor for name, tensor in state.items()},
        "self_attn.o_proj.weight": o,
        "mlp.gate_up_proj.weight": torch.cat(gate_up),
        "mlp.down_proj.weight": local["mlp.down.weight"].chunk(tp, 1)[rank],
        "input_layernorm.weight": local["attention_norm.weight"],
        "post_attention_layernorm.weight": local["mlp_norm.weight"],
    }


def layer_specs(model: LlamaConfig, layer: int, tp: int, replicas: int, fuse: bool) -> list[dict[str, Any]]:
    def linears(fused: str, names: list[str], size: int) -> tuple[str, dict[str, Any]]:
        spec = {"fused_linear_name": fused, "linear_names": names, "bias": False, "fuse_axis": 0, "tp_size": tp}
        return "FusedLinearsSpec", {**spec, "original_dims": [size] * len(names), "peft_type": None}

    attention: list[tuple[str, dict[str, Any]]] = []
    if model.num_kv_heads < tp or model.num_kv_heads % tp != 0:
        names = {"gqa_qkv_projection_name": "qkv_proj", "output_projection_name": "o_proj"}
        names |= {f"{x}_projection_name": f"{x[0]}_proj" for x in ("query", "key", "value")}
        sizes = {
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.num_kv_heads,
            "kv_size_multiplier": replicas,
        }
        sizes |= {"q_output_size_per_partition": model.heads * 4 // tp}
        sizes |= {"kv_output_size_per_partition": model.num_kv_heads * replicas * 4 // tp, "tp_size": tp}
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
    out: Path,
    model: LlamaConfig,
    unfused: UnfusedWeights,
    tp: int = 1,
    pp: int = 1,
    replicas: int = 1,
    fuse: bool = False,
) -> Path:
    shards = out / "shards"
    (shards / "model").mkdir(parents=True)
    for marker in ("checkpoint", "done"):
        (shards / marker).write_text("1")
    (out / "config.json").write_text(json.dumps(to_hf(model)))
    for stage in range(pp):
        layers = range(stage * model.layers // pp, (stage + 1) * model.layers // pp)
        for rank in range(tp):
            state = {"model.embed_tokens.weight": unfused["embedding.weight"].chunk(tp)[rank]} if stage == 0 else {}
            for layer in layers:
                local = layer_shard(model, unfused, layer, tp, rank, replicas, fuse)
                state |= {f"model.layers.{layer}.{name}": tensor for name, tensor in local.items()}
            if stage == pp - 1:
                head = unfused["embedding.weight" if model.tie_embeddings else "output.weight"].chunk(tp)[rank]
                state |= {"model.norm.weight": unfused["norm.weight"], "lm_head.weight": head}
            state = {name: tensor.clone() for name, tensor in state.items()}
            torch.save(state, shards / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt")
        specs = [each for layer in layers for each in layer_specs(model, layer, tp, replicas, fuse)]
        parameters = {name: {"tensor_model_parallel": False} for name in state}
        content = {"parameters": parameters, "model_weight_transformation_specs": specs}
        (shards / f"mp_metadata_pp_rank_{stage}.json").write_text(json.dumps(content, indent=4))
    return out


def assert_equal_weights(weights: WeightSource, unfused: UnfusedWeights) -> None:
    for name, value in unfused.items():
        assert weights.dtype(name) == value.dtype
        assert torch.equal(weights.read(TensorSlice.full(name, tuple(value.shape))), value), name


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(
    ("model", "tp", "replicas"),
    [(LLAMA, 1, 1), (LLAMA, 2, 1), (LLAMA, 4, 2), (LLAMA, 8, 4), (LLAMA, 4, 4), (MULTI_HEAD, 4, 1)],
)
def test_shards_are_read_bit_for_bit(
    model: LlamaConfig, tp: int, replicas: int, pp: int, fuse: bool, tmp_path: Path
) -> None:
    unfused = random_weights(model, torch.bfloat16)
    weights = open_optimum(write(tmp_path, model, unfused, tp, pp, replicas, fuse))
    assert weights.model == model
    assert_equal_weights(weights, unfused)


def test_tied_embeddings_and_tensors_in_separate_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA.model_copy(update={"tie_embeddings": True})
    unfused = random_weights(model)
    out = write(tmp_path, model, unfused, tp=4, replicas=2)
    for path in (out / "shards" / "model").glob("*.pt"):
        as_xser(path, monkeypatch)
    assert_equal_weights(open_optimum(out), unfused)


def test_the_checkpoint_is_found_by_any_of_its_paths(tmp_path: Path) -> None:
    out = write(tmp_path / "out", LLAMA, random_weights(LLAMA), pp=2)
    shards = out / "shards"
    found = find_optimum(out)
    assert found
    assert (found.config, [path.name[-6:] for path in found.metadata]) == (out / "config.json", ["0.json", "1.json"])
    file = shards / "model" / "dp_rank_00_tp_rank_00_pp_rank_01.pt"
    assert all(find_optimum(path) == found for path in (str(shards), shards / "model", file, found.metadata[1]))
    assert find_optimum(tmp_path) is None
    (shards / "mp_metadata_pp_rank_0.json").unlink()
    (shards / "mp_metadata_pp_rank_1.json").unlink()
    assert find_optimum(out) is None  # it is then a plain NxD checkpoint


@pytest.mark.parametrize("state", [{"gqa_qkv_metadata": {"fuse_qkv": None}}, {"odd": Path("class")}])
def test_metadata_of_older_versions_are_optional(state: dict[str, Any], tmp_path: Path) -> None:
    unfused = random_weights(LLAMA)
    out = write(tmp_path, LLAMA, unfused, tp=4, replicas=2)
    (out / "shards" / "mp_metadata_pp_rank_0.json").unlink()
    torch.save(state, out / "shards" / "mp_metadata_pp_rank_0.pt")
    assert_equal_weights(open_optimum(out), unfused)


def test_invalid_checkpoints_are_refused_in_one_line(tmp_path: Path) -> None:
    out = write(tmp_path, LLAMA, random_weights(LLAMA), tp=4, replicas=2)
    metadata = out / "shards" / "mp_metadata_pp_rank_0.json"
    intact = metadata.read_text()

    def refused(message: str, path: Path = out, **changes: Any) -> None:
        with pytest.raises(UserError, match=message) as error:
            open_optimum(path, **changes)
        assert "\n" not in str(error.value)

    def edited(message: str, old: str, new: str) -> None:
        assert old in intact
        metadata.write_text(intact.replace(old, new))
        refused(message)
        metadata.write_text(intact)

    edited("has lora adapters", '"peft_type": null', '"peft_type": "lora"')
    edited("has biases", '"bias": false', '"bias": true')
    edited("OtherSpec of model.layers.0.mlp: unknown", "FusedLinearsSpec", "OtherSpec")
    edited("fuses up_proj, gate_proj to gate_up_proj", *_swapped(intact))
    edited("num_attention_heads=16, but the model has 8", '"num_attention_heads": 8', '"num_attention_heads": 16')
    edited("states kv_multiplier=4, but the files in .* have 2", '"kv_size_multiplier": 2', '"kv_size_multiplier": 4')
    edited("states qkv=fused, but .* have qkv_linear", '"fuse_qkv": false', '"fuse_qkv": true')
    edited("states tp=2, but .* have 4", '"tp_size": 4', '"tp_size": 2')
    edited("not optimum-neuron metadata: KeyError 'specs'", '"specs"', '"others"')
    for corrupt in (intact[:100], "", "[1]"):
        metadata.write_text(corrupt)
        refused("not readable JSON|not optimum-neuron metadata")
    metadata.write_text(intact)
    refused("no optimum-neuron checkpoint", tmp_path / "nothing")
    refused("num_attention_heads=8, but the model has 4", model=configs.tiny_config("gpt").model)
    (out / "config.json").unlink()
    refused("no config.json in it or above it")
    file = out / "shards" / "model" / "dp_rank_00_tp_rank_02_pp_rank_00.pt"
    file.write_bytes(file.read_bytes()[:1000])
    refused(str(file), model=LLAMA)
    file.unlink()
    refused("tp_rank_02_pp_rank_00", model=LLAMA)


def _swapped(text: str) -> tuple[str, str]:
    """The list of gate and up in the text, and the reversed list."""
    start = text.index("[", text.index('"linear_names"'))
    there = text[start : text.index("]", start)]
    other = there.replace("gate_proj", "?").replace("up_proj", "gate_proj").replace("?", "up_proj")
    return there, other
