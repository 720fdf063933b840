"""optimum-neuron's sharded adapters are read bit for bit as the adapters that PEFT would have saved."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.formats.test_peft import peft_model, save
from trainyard.core.errors import UserError
from trainyard.families.hf_config import from_hf
from trainyard.formats.peft.adapter import AdaptedWeights, read_adapter
from trainyard.formats.peft.write_adapter import write_adapter

PREFIX = "base_model.model.model.layers."


def share_a(adapted: Any) -> Any:
    """One A for q, k and v, and one for gate and up, as optimum-neuron trains them."""
    for layer in adapted.base_model.model.model.layers:
        for modules in (
            [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
            [layer.mlp.gate_proj, layer.mlp.up_proj],
        ):
            for module in modules[1:]:
                module.lora_A["default"].weight.data.copy_(modules[0].lora_A["default"].weight)
    return adapted


def regrouped(rows: Tensor, kv_heads: int, replicas: int) -> Tensor:
    return rows.unflatten(0, (kv_heads, replicas, -1)).transpose(0, 1).flatten(0, 2)


def layer_shards(full: dict[str, Tensor], heads: dict[str, Any], tp: int, fuse: bool) -> list[dict[str, Tensor]]:
    """The tensors of one layer on every rank; names follow the layer."""
    a = {name: full[f"{name}.lora_A.weight"] for name in ("self_attn.q_proj", "mlp.gate_proj")}
    b = {name.removesuffix(".lora_B.weight"): value for name, value in full.items() if ".lora_B." in name}
    kv, replicas = heads["num_key_value_heads"], heads["kv_size_multiplier"]
    ranks: list[dict[str, Tensor]] = []
    for rank in range(tp):
        local = {
            "mlp.gate_up_proj.lora_A.weight": a["mlp.gate_proj"],
            "mlp.gate_up_proj.lora_B.weight": torch.cat([b[f"mlp.{x}_proj"].chunk(tp)[rank] for x in ("gate", "up")]),
            "mlp.down_proj.lora_A.weight": full["mlp.down_proj.lora_A.weight"].chunk(tp, 1)[rank],
            "mlp.down_proj.lora_B.weight": b["mlp.down_proj"],
            "self_attn.o_proj.lora_B.weight": b["self_attn.o_proj"],
        }
        output = full["self_attn.o_proj.lora_A.weight"]
        if kv < tp:
            q = regrouped(b["self_attn.q_proj"], kv, replicas).chunk(tp)[rank]
            k, v = (b[f"self_attn.{x}_proj"].repeat(replicas, 1).chunk(tp)[rank] for x in "kv")
            output = regrouped(output.T, kv, replicas).T
            fused = "self_attn.qkv_proj.lora_"
            local[f"{fused}A.weight"] = a["self_attn.q_proj"]
            parts = {"qkv": torch.cat([q, k, v])} if fuse else {"q": q, "k": k, "v": v}
            local |= {f"{fused}B.weight_{suffix}": part for suffix, part in parts.items()}
        else:
            for x in "qkv":
                local[f"self_attn.{x}_proj.lora_A.weight"] = a["self_attn.q_proj"]
                local[f"self_attn.{x}_proj.lora_B.weight"] = b[f"self_attn.{x}_proj"].chunk(tp)[rank]
        local["self_attn.o_proj.lora_A.weight"] = output.chunk(tp, 1)[rank]
        ranks.append({name: tensor.clone() for name, tensor in local.items()})
    return ranks


def layer_specs(layer: int, heads: dict[str, Any], sizes: dict[str, int], tp: int, fuse: bool) -> list[dict[str, Any]]:
    gate_up = {"fused_linear_name": "gate_up_proj", "linear_names": ["gate_proj", "up_proj"], "bias": False}
    gate_up |= {"fuse_axis": 0, "original_dims": [sizes["ffn"]] * 2, "tp_size": tp, "peft_type": "lora"}
    names = {f"{part}_projection_name": f"{part[0]}_proj" for part in ("query", "key", "value", "output")}
    kv_rows = heads["num_key_value_heads"] * heads["kv_size_multiplier"] * sizes["head"] // tp
    rows = {
        "q_output_size_per_partition": heads["num_attention_heads"] * sizes["head"] // tp,
        "kv_output_size_per_partition": kv_rows,
    }
    other = {"gqa_qkv_projection_name": "qkv_proj", "fuse_qkv": fuse, "bias": False, "tp_size": tp, "peft_type": "lora"}
    attention = [["GQAQKVColumnParallelLinearSpec", {**names, **heads, **rows, **other}]]
    return [
        {
            "module_fully_qualified_name": f"{PREFIX}{layer}.self_attn",
            "specs": attention if heads["num_key_value_heads"] < tp else [],
        },
        {"module_fully_qualified_name": f"{PREFIX}{layer}.mlp", "specs": [["FusedLinearsSpec", gate_up]]},
    ]


def write(source: Path, model: Any, out: Path, tp: int, pp: int = 1, fuse: bool = False) -> Path:
    """Shard PEFT's folder `source`; returns the output directory, as optimum-neuron leaves it."""
    adapter = out / "adapter_default"
    shards = adapter / "adapter_shards"
    (shards / "model").mkdir(parents=True)
    for marker in ("checkpoint", "done"):
        (shards / marker).write_text("1")
    shutil.copy(source / "adapter_config.json", adapter)
    full = load_file(source / "adapter_model.safetensors")
    heads = {"num_attention_heads": model.heads, "num_key_value_heads": model.num_kv_heads}
    heads["kv_size_multiplier"] = max(tp // model.num_kv_heads, 1)
    per_stage = model.layers // pp
    for stage in range(pp):
        ranks: list[dict[str, Tensor]] = [{} for _ in range(tp)]
        specs: list[dict[str, Any]] = []
        for layer in range(stage * per_stage, (stage + 1) * per_stage):
            prefix = f"{PREFIX}{layer}."
            own = {name.removeprefix(prefix): value for name, value in full.items() if name.startswith(prefix)}
            for rank, local in enumerate(layer_shards(own, heads, tp, fuse)):
                ranks[rank] |= {prefix + name: tensor for name, tensor in local.items()}
            specs += layer_specs(layer, heads, {"ffn": model.ffn, "head": model.head_size}, tp, fuse)
        parameters: dict[str, Any] = {}
        for name in ranks[0]:
            is_row = any(x in name for x in ("o_proj", "down_proj"))
            sharded = ("lora_A" in name) == is_row
            fact = {"tensor_model_parallel": sharded}
            if sharded:
                fact |= {"partition_dim": int(is_row), "partition_stride": 1, "num_partitions": tp}
            module, _, last = name.rpartition(".")
            parameters[f"{module}.default.{last}"] = fact
        for rank, state in enumerate(ranks):
            torch.save(state, shards / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt")
        content = {"parameters": parameters, "model_weight_transformation_specs": specs}
        (shards / f"mp_metadata_pp_rank_{stage}.json").write_text(json.dumps(content))
    return out


@pytest.mark.parametrize(("tp", "pp", "fuse"), [(1, 1, False), (2, 2, False), (4, 1, False), (4, 2, True)])
def test_shards_are_the_adapter_that_peft_saves(tp: int, pp: int, fuse: bool, tmp_path: Path) -> None:
    adapted = share_a(peft_model())
    model = from_hf(adapted.config.to_dict())
    source = save(adapted, tmp_path / "peft")
    out = write(source, model, tmp_path / "out", tp, pp, fuse)
    expected = load_file(source / "adapter_model.safetensors")
    for path in (out, out / "adapter_default", out / "adapter_default" / "adapter_shards"):
        tensors = {name: tensor.read() for name, tensor in read_adapter(path).tensors.items()}
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    write_adapter(tmp_path / "again", AdaptedWeights(read_adapter(out), model, None))
    written = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in expected.items())
    assert peft.LoraConfig.from_pretrained(str(tmp_path / "again")).r == 4


def test_shards_that_cannot_be_joined_are_refused_in_one_line(tmp_path: Path) -> None:
    adapted = share_a(peft_model())
    model = from_hf(adapted.config.to_dict())
    out = write(save(adapted, tmp_path / "peft"), model, tmp_path / "out", 4)
    shards = out / "adapter_default" / "adapter_shards"
    metadata, file = shards / "mp_metadata_pp_rank_0.json", shards / "model" / "dp_rank_00_tp_rank_03_pp_rank_00.pt"
    intact, state = metadata.read_text(), torch.load(file)

    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message) as error:
            read_adapter(out)
        assert "\n" not in str(error.value)

    for old, new, message in (
        ("GQAQKVColumnParallelLinearSpec", "OtherSpec", "OtherSpec of .*self_attn: unknown"),
        ('"bias": false', '"bias": true', "has biases"),
        ('"tp_size": 4', '"tp_size": 2', "tp_size=2, but there are 4 ranks"),
        ('"specs"', '"others"', "KeyError 'specs'"),
        ('"partition_stride": 1', '"partition_stride": 2', "partition_stride=2"),
    ):
        assert old in intact
        metadata.write_text(intact.replace(old, new))
        refused(message)
    metadata.write_text(intact)
    for name, message in (
        (f"{PREFIX}0.self_attn.qkv_proj.lora_A.weight", "copies in .*qkv_proj differ"),
        (f"{PREFIX}0.self_attn.qkv_proj.lora_B.weight_k", "copies in .*lora_B differ"),
    ):
        torch.save({**state, name: state[name] + 1}, file)
        refused(message)
    torch.save({**state, "base_model.model.lm_head.weight": torch.zeros(2, 2)}, file)
    refused("lm_head.weight is no LoRA matrix")
    file.with_name(file.name.replace("tp_rank_03", "tp_rank_02")).unlink()
    refused("1 of 4 ranks are missing")
