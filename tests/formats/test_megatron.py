"""Megatron checkpoints of every layout are read bit for bit as the weights that plain torch code sharded."""

import argparse
import enum
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import configs
from tests.support.configs import tiny_batch
from trainyard import models
from trainyard.checkpoint.weights import unfused_tensors
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.builtin.gpt import GptConfig
from trainyard.families.builtin.llama import LlamaConfig
from trainyard.formats.megatron.rank_files import find_megatron
from trainyard.formats.megatron.weights import open_megatron
from trainyard.formats.tensor_map import ShardedWeights

UnfusedWeights = dict[str, Tensor]
GPT = GptConfig(**{**configs.GPT, "layers": 4, "vocab": 250, "activation": "gelu"})
LLAMA = LlamaConfig(**{**configs.LLAMA, "layers": 4, "vocab": 250, "heads": 8, "kv_heads": 4, "tie_embeddings": False})
ARGS = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
LLAMA_ARGS = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 4,
    "kv_channels": 4,
    "max_position_embeddings": 64,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "params_dtype": torch.bfloat16,
}


def random_weights(model: models.ModelConfig, dtype: torch.dtype = torch.float32) -> UnfusedWeights:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(tensor.sizes, generator=generator) * 0.3 + ("norm" in name)).to(dtype)
        for name, tensor in unfused_tensors(model).items()
    }


def fused_heads(matrices: list[Tensor], groups: int, version: float) -> Tensor:
    """Fuse query, key and value of one rank in the order of a checkpoint version."""
    if version == 0:
        return torch.cat(matrices)
    by_group = [matrix.unflatten(0, (groups, -1)) for matrix in matrices]
    return torch.cat(by_group, 1).flatten(0, 1)


def layer_shard(
    model: GptConfig | LlamaConfig, unfused: UnfusedWeights, number: int, tp: int, rank: int, version: float
) -> UnfusedWeights:
    """The shard of a layer on a tensor-parallel rank, with the AWS reference's names."""
    layer_weights = {name.removeprefix(f"layers.{number}."): value for name, value in unfused.items()}
    out = {}
    for kind in ("weight", "bias") if isinstance(model, GptConfig) else ("weight",):
        qkv = [layer_weights[f"attention.{x}.{kind}"].chunk(tp)[rank] for x in "qkv"]
        up = [
            layer_weights[f"mlp.{x}.{kind}"].chunk(tp)[rank]
            for x in ("gate", "up")
            if f"mlp.{x}.{kind}" in layer_weights
        ]
        dense, down = layer_weights[f"attention.output.{kind}"], layer_weights[f"mlp.down.{kind}"]
        out |= {
            f"input_layernorm.{kind}": layer_weights[f"attention_norm.{kind}"],
            f"self_attention.query_key_value.{kind}": fused_heads(qkv, model.num_kv_heads // tp, version),
            f"self_attention.dense.{kind}": dense.chunk(tp, 1)[rank] if kind == "weight" else dense,
            f"post_attention_layernorm.{kind}": layer_weights[f"mlp_norm.{kind}"],
            f"mlp.dense_h_to_4h.{kind}": torch.cat(up),
            f"mlp.dense_4h_to_h.{kind}": down.chunk(tp, 1)[rank] if kind == "weight" else down,
        }
    return {f"layers.{number}.{name}": tensor.clone() for name, tensor in out.items()}


def padded(matrix: Tensor, rows: int, tp: int, rank: int) -> Tensor:
    filler = torch.full(
        (rows - len(matrix), matrix.shape[1]), 7.0, dtype=matrix.dtype
    )  # in Megatron, padding is not always zero
    return torch.cat([matrix, filler]).chunk(tp)[rank].clone()


def stage_state(
    model: GptConfig | LlamaConfig,
    unfused: UnfusedWeights,
    layers: range,
    tp: int,
    rank: int,
    version: float = 3.0,
    rows: int = 256,
) -> dict[str, Any]:
    """The `model` dict of a stage on one rank."""
    encoder = {}
    for local, number in enumerate(layers):
        layer = layer_shard(model, unfused, number, tp, rank, version)
        encoder |= {name.replace(f"layers.{number}.", f"layers.{local}."): value for name, value in layer.items()}
    language: dict[str, Any] = {"encoder": encoder}
    out: dict[str, Any] = {"language_model": language}
    embedding = padded(unfused["embedding.weight"], rows, tp, rank)
    if layers.start == 0:
        language["embedding"] = {"word_embeddings": {"weight": embedding}}
        if "position.weight" in unfused:
            language["embedding"]["position_embeddings"] = {"weight": unfused["position.weight"]}
    if layers.stop == model.layers:
        encoder |= {
            f"final_layernorm.{kind}": unfused[f"norm.{kind}"]
            for kind in ("weight", "bias")
            if f"norm.{kind}" in unfused
        }
        if not model.tie_embeddings:
            language["output_layer"] = {"weight": padded(unfused["output.weight"], rows, tp, rank)}
        elif layers.start:
            out["word_embeddings_for_head"] = {"weight": embedding.clone()}
    return out


def write(
    root: Path,
    model: GptConfig | LlamaConfig,
    unfused: UnfusedWeights,
    tp: int = 1,
    pp: int = 1,
    version: float = 3.0,
    vpp: int = 1,
    **args: Any,
) -> Path:
    """Write an iteration as Megatron saves it. Returns the root."""
    per_chunk = model.layers // (pp * vpp)
    for rank in range(tp):
        for stage in range(pp):
            starts = [per_chunk * (chunk * pp + stage) for chunk in range(vpp)]
            chunks = [
                stage_state(model, unfused, range(start, start + per_chunk), tp, rank, version) for start in starts
            ]
            state = {"model": chunks[0]} if vpp == 1 else {f"model{i}": chunk for i, chunk in enumerate(chunks)}
            sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
            version_entry = {"checkpoint_version": version} if version else {}
            directory = root / "iter_0000005" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            directory.mkdir(parents=True)
            torch.save(
                {**sizes, **version_entry, "iteration": 5, **(args or ARGS), **state}, directory / "model_optim_rng.pt"
            )
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return root


def assert_equal_weights(weights: ShardedWeights, unfused: UnfusedWeights) -> None:
    for name, value in unfused.items():
        assert weights.dtype(name) == value.dtype
        full = TensorSlice.full(name, tuple(value.shape))
        assert torch.equal(weights.read(full), value), name
        corner = TensorSlice(name, full.sizes, tuple(size // 3 for size in full.sizes), (1,) * len(full.sizes))
        assert torch.equal(weights.read(corner), value[corner.to_index()]), name


@pytest.mark.parametrize("version", [0, 2.0, 3.0])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gpt_is_read_bit_for_bit(tp: int, pp: int, version: float, tmp_path: Path) -> None:
    unfused = random_weights(GPT)
    weights = open_megatron(write(tmp_path, GPT, unfused, tp, pp, version), GPT)
    assert weights.model == GPT
    assert_equal_weights(weights, unfused)


def test_logits_equal_those_of_the_original_model(tmp_path: Path) -> None:
    original = configs.tiny_model(GPT).eval()
    blueprint = models.family_of(GPT).blueprint(GPT)

    def split(name: str) -> Iterator[tuple[str, Tensor]]:
        slices = blueprint.local_slices(name)
        values = original.get_parameter(name).detach().split([piece.sizes[0] for piece in slices])
        yield from zip((piece.name for piece in slices), values, strict=True)

    unfused = dict(pair for name in blueprint.parameter_names() for pair in split(name))
    weights = open_megatron(write(tmp_path, GPT, unfused, tp=2, pp=2), GPT)

    def values(name: str) -> Tensor:
        return torch.cat([weights.read(piece) for piece in blueprint.local_slices(name)])

    filled = models.fill_parameters(models.build_model(weights.model), values).eval()
    batch = tiny_batch("gpt")
    assert torch.equal(filled(batch).logits(), original(batch).logits())


def test_the_configuration_is_inferred_from_the_files(tmp_path: Path) -> None:
    """The AWS reference stores sizes only; the inferred vocabulary is the padded one."""
    weights = open_megatron(write(tmp_path, GPT, random_weights(GPT), tp=2, pp=2))
    assert weights.model == GPT.model_copy(update={"vocab": 256, "ffn": 128})
    vocab, activation = weights.notes
    assert "vocab=256" in vocab
    assert "activation=gelu" in activation
    assert weights.read(TensorSlice("embedding.weight", (256, 32), (250, 0), (6, 32))).eq(7).all()


def test_virtual_stages_alternate(tmp_path: Path) -> None:
    unfused = random_weights(GPT)
    assert_equal_weights(open_megatron(write(tmp_path, GPT, unfused, tp=2, pp=2, vpp=2), GPT), unfused)


@pytest.mark.parametrize("pp", [1, 2])
def test_an_upstream_llama_is_inferred_from_its_arguments(pp: int, tmp_path: Path) -> None:
    unfused = random_weights(LLAMA, torch.bfloat16)
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": pp}
    weights = open_megatron(write(tmp_path, LLAMA, unfused, 2, pp, args=argparse.Namespace(**LLAMA_ARGS, **sizes)))
    assert weights.model == LLAMA.model_copy(update={"vocab": 256, "head_dim": 4})
    rows = {name: unfused.pop(name) for name in ("embedding.weight", "output.weight")}
    assert_equal_weights(weights, unfused)
    for name, value in rows.items():
        assert torch.equal(weights.read(TensorSlice(name, (256, 32), (0, 0), (250, 32))), value)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0}, {"kind": "llama3", "factor": 32.0}),
        ({"rotary_seq_len_interpolation_factor": 4}, {"kind": "linear", "factor": 4.0}),
    ],
)
def test_rope_scaling_is_read(changes: dict[str, Any], found: dict[str, Any], tmp_path: Path) -> None:
    args = argparse.Namespace(**{**LLAMA_ARGS, **changes})
    model = open_megatron(write(tmp_path, LLAMA, random_weights(LLAMA), args=args)).model
    assert isinstance(model, LlamaConfig)
    assert {key: getattr(model.rope_scaling, key) for key in found} == found


def renamed(root: Path, changes: dict[str, str]) -> None:
    """Rewrite the files with other names, as one flat dict."""

    def walk(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        for key, value in tree.items():
            yield from walk(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]

    for path in root.glob("iter_*/*/*.pt"):
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(path, weights_only=True)
        tensors = {}
        for name, tensor in walk(state["model"]):
            for old, new in changes.items():
                name = name.replace(old, new)
            tensors[name] = tensor
        torch.save({**state, "model": tensors}, path)


def test_names_of_older_and_newer_versions(tmp_path: Path) -> None:
    unfused = random_weights(GPT)
    old = write(tmp_path / "old", GPT, unfused, pp=2)
    renamed(old, {"encoder.layers": "transformer.layers", "self_attention": "attention"})
    assert_equal_weights(open_megatron(old, GPT), unfused)
    newer = write(tmp_path / "newer", GPT, unfused, pp=2)
    renamed(newer, {"_layernorm": "_norm"})
    assert_equal_weights(open_megatron(newer, GPT), unfused)
    core = write(tmp_path / "core", GPT, unfused, pp=2, **ARGS, untie_embeddings_and_output_weights=False)
    names = {"language_model.": "", "encoder.": "decoder.", "word_embeddings_for_head": "output_layer"}
    names |= {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "query_key_value": "linear_qkv"}
    names |= {
        "post_attention_layernorm.": "mlp.linear_fc1.layer_norm_",
        "self_attention.dense": "self_attention.linear_proj",
    }
    renamed(core, {**names, "dense_h_to_4h": "linear_fc1", "dense_4h_to_h": "linear_fc2"})
    assert_equal_weights(open_megatron(core, GPT), unfused)


@pytest.mark.parametrize("pp", [1, 2])
def test_nemo_megatron_fuses_key_and_value_and_separates_gate_and_up(pp: int, tmp_path: Path) -> None:
    unfused, tp = random_weights(LLAMA), 2
    for rank in range(tp):
        for stage in range(pp):
            numbers = range(stage * 4 // pp, (stage + 1) * 4 // pp)
            tensors: UnfusedWeights = {}
            for local, number in enumerate(numbers):
                layer = layer_shard(LLAMA, unfused, number, tp, rank, 2.0)
                layer_weights = {name.removeprefix(f"layers.{number}."): value for name, value in layer.items()}
                q, k, v = (unfused[f"layers.{number}.attention.{x}.weight"].chunk(tp)[rank] for x in "qkv")
                del layer_weights["self_attention.query_key_value.weight"]
                gate, up = layer_weights.pop("mlp.dense_h_to_4h.weight").chunk(2)
                layer_weights |= {"mlp.dense_h_to_4h.weight": gate, "mlp.dense_h_to_4h_2.weight": up}
                layer_weights |= {
                    "self_attention.query.weight": q,
                    "self_attention.key_value.weight": fused_heads([k, v], 2, 2.0),
                }
                layer_weights["self_attention.core_attention.rotary_emb.inv_freq"] = torch.ones(2)
                tensors |= {f"encoder.layers.{local}.{name}": value.clone() for name, value in layer_weights.items()}
            if stage == 0:
                tensors["embedding.word_embeddings.weight"] = padded(unfused["embedding.weight"], 250, tp, rank)
            if stage == pp - 1:
                tensors["encoder.final_layernorm.weight"] = unfused["norm.weight"]
                tensors["output_layer.weight"] = padded(unfused["output.weight"], 250, tp, rank)
            directory = tmp_path / (f"tp_rank_{rank:02d}_pp_rank_{stage:03d}" if pp > 1 else f"mp_rank_{rank:02d}")
            directory.mkdir()
            state = {f"model.language_model.{name}": tensor for name, tensor in tensors.items()}
            torch.save({"state_dict": state, "epoch": 0, "global_step": 0}, directory / "model_optim_rng.ckpt")
    assert_equal_weights(open_megatron(tmp_path, LLAMA), unfused)
    with pytest.raises(UserError, match="is missing; pass the model's configuration"):
        open_megatron(tmp_path)


def as_xser(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrite a file as torch-xla does: references, and a file per tensor."""

    class TensorReference:
        def __init__(self, tid: int) -> None:
            self.tid = tid

    def to_references(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: to_references(value) for key, value in tree.items()}
        if not isinstance(tree, Tensor):
            return tree
        reference = TensorReference(len(list(directory.iterdir())))
        torch.save(tree, directory / f"tensor_{reference.tid}.pt")
        return reference

    directory, state = Path(f"{path}.tensors"), torch.load(path)
    directory.mkdir()
    with monkeypatch.context() as patch:
        for name in ("torch_xla", "torch_xla.utils", "torch_xla.utils.serialization"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        TensorReference.__module__, TensorReference.__qualname__ = name, "TensorReference"
        patch.setattr(sys.modules[name], "TensorReference", TensorReference, raising=False)
        torch.save(to_references(state), path)


def test_tensors_in_separate_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfused = random_weights(GPT, torch.bfloat16)
    root = write(tmp_path, GPT, unfused, tp=2)
    for path in root.glob("iter_*/*/*.pt"):
        as_xser(path, monkeypatch)
    assert_equal_weights(open_megatron(root, GPT), unfused)


def test_arguments_may_hold_classes_of_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfused = random_weights(LLAMA)
    with monkeypatch.context() as patch:
        module = types.ModuleType("megatron_enums")
        patch.setitem(sys.modules, module.__name__, module)
        kind = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module=module.__name__)
        patch.setattr(module, "ModelType", kind, raising=False)
        args = argparse.Namespace(**LLAMA_ARGS, model_type=kind(1), rank=0)
        root = write(tmp_path, LLAMA, unfused, args=args, random_rng_state=random.getstate())
    assert_equal_weights(open_megatron(root, LLAMA), unfused)


def test_the_checkpoint_is_found_by_any_of_its_paths(tmp_path: Path) -> None:
    root = write(tmp_path, GPT, random_weights(GPT), tp=2, pp=2)
    iteration = root / "iter_0000005"
    file = iteration / "mp_rank_01_001" / "model_optim_rng.pt"
    found = find_megatron(root)
    assert found
    assert (found.tp, found.pp, found.grid[1, 1], found.notes) == (2, 2, file, ())
    assert all(find_megatron(path) == found for path in (str(iteration), file.parent, file))
    iteration.rename(root / "release")
    (root / "latest_checkpointed_iteration.txt").write_text("release\n")
    released = find_megatron(root)
    assert released
    assert released.grid[0, 0].parts[-3] == "release"
    assert find_megatron(root / "nothing") is None
    (tmp_path / "other").mkdir()
    assert find_megatron(tmp_path / "other") is None
    with pytest.raises(UserError, match="no Megatron checkpoint"):
        open_megatron(tmp_path / "other")


def test_a_missing_iteration_falls_back_to_the_latest_complete_one(tmp_path: Path) -> None:
    root = write(tmp_path, GPT, random_weights(GPT), tp=2)
    latest = root / "latest_checkpointed_iteration.txt"
    latest.write_text("9")
    half = root / "iter_0000007" / "mp_rank_01"
    half.mkdir(parents=True)
    (half / "model_optim_rng.pt").write_bytes(b"")
    found = find_megatron(root)
    assert found
    assert found.grid[0, 0].parts[-3] == "iter_0000005"
    assert "reading iter_0000005" in found.notes[0]
    latest.unlink()
    assert "reading iter_0000005" in open_megatron(root, GPT).notes[0]


def refused(path: Path, message: str, model: models.ModelConfig | None = GPT) -> None:
    with pytest.raises(UserError, match=message) as error:
        open_megatron(path, model)
    assert "\n" not in str(error.value)


def changed(path: Path, **changes: Any) -> None:
    torch.save({**torch.load(path), **changes}, path)


def test_invalid_files_are_refused_in_one_line(tmp_path: Path) -> None:
    root = write(tmp_path / "a", GPT, random_weights(GPT), tp=2, pp=2)
    iteration = root / "iter_0000005"
    (iteration / "mp_rank_00_001" / "model_optim_rng.pt").rename(tmp_path / "kept.pt")
    refused(root, r"model_optim_rng.pt is missing in mp_rank_00_001 \(tp=2 x pp=2")
    refused(
        write(tmp_path / "b", GPT, random_weights(GPT), 1, 1, **ARGS, tensor_model_parallel_size=4),
        "saved by tp=4 x pp=1",
    )
    root = write(tmp_path / "c", GPT, random_weights(GPT))
    file = root / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    intact = file.read_bytes()
    changed(file, checkpoint_version=1.0)
    refused(root, "checkpoint_version=1.0: it interleaves query, key and value row by row")
    file.write_bytes(intact)
    state = torch.load(file)
    state["model"]["language_model"]["encoder"]["layers.0.inter_attention.dense.weight"] = torch.zeros(1)
    torch.save(state, file)
    refused(root, "layers.0.inter_attention.dense.weight is not a tensor of this model")
    torch.save([1, 2], file)
    refused(root, "not a Megatron checkpoint: expected a dict, found a list")
    torch.save({"weights": torch.zeros(2)}, file)
    refused(root, "not a Megatron checkpoint: has no model, only weights")
    (tmp_path / "d" / "iter_0000005").mkdir(parents=True)
    for name in (".metadata", "common.pt"):
        (tmp_path / "d" / "iter_0000005" / name).touch()
    (tmp_path / "d" / "latest_checkpointed_iteration.txt").write_text("5")
    refused(tmp_path / "d", "common.pt: corrupt, or not a file of torch.save")
    for wrong in (intact[: len(intact) // 2], b"not a zip file", b""):
        file.write_bytes(wrong)
        refused(root, "model_optim_rng.pt: ")


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"heads": 8}, "num_attention_heads=4, but the model has heads=8"),
        ({"layers": 2}, "num_layers=4, but the model has layers=2"),
        ({"ffn": 64}, r"mlp.dense_h_to_4h.weight is \[128, 32\], the model expects \[64, 32\]"),
        ({"vocab": 257}, "word_embeddings.weight has 256 x tp=1 rows, the model has vocab=257"),
        ({"tie_embeddings": False}, "no tensor in it holds output.weight"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_in_one_line(
    update: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(write(tmp_path, GPT, random_weights(GPT)), message, GPT.model_copy(update=update))


def test_unsupported_models_are_refused_in_one_line(tmp_path: Path) -> None:
    root = write(tmp_path / "gpt", GPT, random_weights(GPT))
    refused(root, "family=bert: not supported in Megatron files", configs.tiny_config("bert").model)
    llama = LLAMA.model_copy(update={"heads": 4, "kv_heads": 4, "ffn": 128})
    refused(root, r"dense_h_to_4h.weight is \[128, 32\], the model expects \[256, 32\]", llama)
    split = write(tmp_path / "split", LLAMA, random_weights(LLAMA), tp=4, num_layers=4)
    fewer = LLAMA.model_copy(update={"kv_heads": 2})
    refused(split, "layers.0.attention.q.weight cannot be split over tp=4 ranks", fewer)
    for key, value in (("normalization", "LayerNorm"), ("num_experts", 8), ("rotary_percent", 0.5)):
        args = argparse.Namespace(**{**LLAMA_ARGS, key: value})
        refused(write(tmp_path / key, LLAMA, random_weights(LLAMA), args=args), f"{key}={value}: not supported", None)
    args = argparse.Namespace(**{**LLAMA_ARGS, "kv_channels": 5})
    refused(write(tmp_path / "odd", LLAMA, random_weights(LLAMA), args=args), "RoPE needs an even head size", None)
    state = {"model": {}, "checkpoint_version": 3.0}
    file = tmp_path / "model_optim_rng.pt"
    torch.save(state, file)
    refused(file, "word_embeddings.weight is missing", None)
