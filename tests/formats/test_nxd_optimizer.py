"""The optimizer state of NxD runs is read bit for bit: moments and master weights, from any tp, pp and dp."""

import shutil
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.formats.test_nxd import RandomWeights, cases, load_rank, write
from tests.support.examples import examples
from trainyard import models
from trainyard.checkpoint.partition import rank_slices
from trainyard.checkpoint.weights import TrainingState, unfused_tensors
from trainyard.core.errors import UserError
from trainyard.core.splits import ModelShard, shard_rows
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.builtin.llama import LlamaConfig
from trainyard.families.builtin.mixtral import MixtralConfig
from trainyard.families.decoder import DecoderConfig
from trainyard.formats.convert import ConversionTarget, convert_checkpoint
from trainyard.formats.nxd.layout import NxdLayout
from trainyard.formats.nxd.optimizer import find_optimizer, open_nxd_state
from trainyard.formats.registry import open_weights

# A checkpoint as NxD writes it, made with plain torch

UnfusedWeights = dict[str, Tensor]
State = dict[str, UnfusedWeights]
Rank = tuple[int, int, int]
"""Data-parallel, tensor-parallel and pipeline rank."""
STAGES = {1: [[0, 1, 2]], 2: [[0], [1, 2]]}


def llama(**changes: Any) -> LlamaConfig:
    """A model whose rows no dp divides: hidden size 17, and 9 vocabulary rows on each of 4 ranks."""
    base = {"vocab": 36, "hidden": 17, "layers": 3, "heads": 8, "kv_heads": 2, "head_dim": 4, "ffn": 20}
    return LlamaConfig(family="llama", max_positions=32, **{**base, **changes})


def mixtral() -> MixtralConfig:
    """The same with five experts."""
    llama_only = {"attention_bias", "mlp_bias", "activation"}
    return MixtralConfig(
        experts=5, **{**llama().model_dump(exclude_none=True, exclude=llama_only), "family": "mixtral"}
    )


def random_state(model: DecoderConfig, seed: int = 1) -> State:
    """Random master weights and moments, all different."""
    generator = torch.Generator().manual_seed(seed)
    tensors = unfused_tensors(model).items()
    return {
        kind: {name: torch.randn(tensor.sizes, generator=generator) for name, tensor in tensors}
        for kind in ("weights", "first", "second")
    }


def rank_tensors(
    tensors: UnfusedWeights, model: DecoderConfig, tp: int, pp: int, replicas: int, rank: tuple[int, int]
) -> UnfusedWeights:
    """The tensors of NxD's Llama or Mixtral model (qkv_linear, trn1) on a rank, in the order of its modules."""
    r, stage = rank
    by_slot = (
        model.num_kv_heads,
        replicas,
        model.heads // model.num_kv_heads // replicas * model.head_size,
        model.hidden,
    )
    out: UnfusedWeights = {}
    if stage == 0:
        out["model.embed_tokens.weight"] = tensors["embedding.weight"].chunk(tp)[r]
    for i in STAGES[pp][stage]:
        unfused, nxd = f"layers.{i}.", f"model.layers.{i}."
        q, k, v, o = (tensors[f"{unfused}attention.{x}.weight"] for x in ("q", "k", "v", "output"))
        permuted = q.view(by_slot).transpose(0, 1).reshape(q.shape)
        columns = o.T.reshape(by_slot).transpose(0, 1).reshape(q.shape).T
        out[f"{nxd}self_attn.qkv_proj.weight_q"] = permuted.chunk(tp)[r]
        out[f"{nxd}self_attn.qkv_proj.weight_k"] = k.repeat(replicas, 1).chunk(tp)[r]
        out[f"{nxd}self_attn.qkv_proj.weight_v"] = v.repeat(replicas, 1).chunk(tp)[r]
        out[f"{nxd}self_attn.o_proj.weight"] = columns.chunk(tp, 1)[r]
        if isinstance(model, MixtralConfig):
            gate, up, down = (
                torch.stack([tensors[f"{unfused}mlp.experts.{e}.{x}.weight"].T for e in range(model.experts)])
                for x in ("gate", "up", "down")
            )
            out[f"{nxd}mlp.router.linear_router.weight"] = tensors[f"{unfused}mlp.router.weight"]
            experts = f"{nxd}mlp.expert_mlps.mlp_op."
            out[f"{experts}gate_up_proj.weight"] = torch.cat([gate.chunk(tp, 2)[r], up.chunk(tp, 2)[r]], 2)
            out[f"{experts}down_proj.weight"] = down.chunk(tp, 1)[r]
        else:
            gate, up = (tensors[f"{unfused}mlp.{x}.weight"].chunk(tp)[r] for x in ("gate", "up"))
            out[f"{nxd}mlp.gate_up_proj.weight"] = torch.cat([gate, up])
            out[f"{nxd}mlp.down_proj.weight"] = tensors[f"{unfused}mlp.down.weight"].chunk(tp, 1)[r]
        out[f"{nxd}input_layernorm.weight"] = tensors[f"{unfused}attention_norm.weight"]
        out[f"{nxd}post_attention_layernorm.weight"] = tensors[f"{unfused}mlp_norm.weight"]
    if stage == pp - 1:
        out["model.norm.weight"] = tensors["norm.weight"]
        out["lm_head.weight"] = tensors["embedding.weight" if model.tie_embeddings else "output.weight"].chunk(tp)[r]
    return {name: value.clone() for name, value in out.items()}


def one_group(names: list[str]) -> list[list[str]]:
    """The examples of NxD and NxDT look for LayerNorm, which is in no Llama name: the second group is empty."""
    return [[name for name in names if "LayerNorm" not in name], [name for name in names if "LayerNorm" in name]]


def two_groups(names: list[str]) -> list[list[str]]:
    return [[name for name in names if "norm" not in name], [name for name in names if "norm" in name]]


def zero1_rows(tensor: Tensor, dp: int, rank: int) -> Tensor:
    """The rows that torch-xla's ZeroRedundancyOptimizer gives a rank."""
    padding = [0, 0] * (tensor.dim() - 1) + [0, -len(tensor) % dp]
    return F.pad(tensor, padding).chunk(dp)[rank].clone()


def zero1_state(state: State, groups: list[list[str]], dp: int, rank: int, masters: bool, step: Any) -> dict[str, Any]:
    """The state dict of the optimizer on a data-parallel rank."""
    names = [name for group in groups for name in group]
    ids = iter(range(len(names)))
    shard = {kind: [zero1_rows(tensors[name], dp, rank) for name in names] for kind, tensors in state.items()}
    return {
        "state": {},
        "param_groups": [{"lr": 1e-4, "params": [next(ids) for _ in group]} for group in groups],
        "base_state": {
            i: {"step": step, "exp_avg": shard["first"][i], "exp_avg_sq": shard["second"][i]} for i in range(len(names))
        },
        "shape_info": {i: state["first"][name].shape for i, name in enumerate(names)},
        **({"sharded_master_weights": dict(enumerate(shard["weights"]))} if masters else {}),
    }


@contextmanager
def torch_xla() -> Iterator[Any]:
    """The class of torch-xla's references, as if the package were installed."""
    with mock.patch.dict(sys.modules):
        for name in ("torch_xla", "torch_xla.utils", "torch_xla.utils.serialization"):
            sys.modules[name] = types.ModuleType(name)
        reference = type("TensorReference", (), {"__module__": name})
        vars(sys.modules[name])["TensorReference"] = reference
        yield reference


def save(value: Any, path: Path, xser: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not xser:
        torch.save(value, path)
        return
    tensors: list[Tensor] = []
    folder = Path(f"{path}.tensors")
    folder.mkdir()

    def to_references(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            reference = reference_class()
            reference.tid = len(tensors)
            torch.save(tree, folder / f"tensor_{reference.tid}.pt")
            tensors.append(tree)
            return reference
        if isinstance(tree, dict):
            return {key: to_references(item) for key, item in tree.items()}
        return [to_references(item) for item in tree] if type(tree) is list else tree

    with torch_xla() as reference_class:
        torch.save(to_references(value), path)
    info = {tid: {"dtype": tensor.dtype, "shape": tensor.shape} for tid, tensor in enumerate(tensors)}
    torch.save(info, f"{path}.info.pt")


def rank_file_name(dp: int, tp: int = 0, pp: int = 0) -> str:
    return f"dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


def write_checkpoint(
    tag: Path,
    model: DecoderConfig,
    state: State,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    replicas: int = 1,
    xser: bool = False,
    masters: bool = True,
    groups: Callable[[list[str]], list[list[str]]] = one_group,
    step: Any = 7,
) -> Path:
    """Write a tag with model and optimizer files."""
    for rank in [(t, p) for p in range(pp) for t in range(tp)]:
        local = {kind: rank_tensors(tensors, model, tp, pp, replicas, rank) for kind, tensors in state.items()}
        weights = {name: value.bfloat16() for name, value in local["weights"].items()}
        save(weights, tag / "model" / rank_file_name(0, *rank), xser)
        names = list(weights)
        if model.tie_embeddings and "model.embed_tokens.weight" in names and "lm_head.weight" in names:
            names.remove("lm_head.weight")  # parameters() lists a shared parameter once
        for d in range(dp):
            save(
                zero1_state(local, groups(names), dp, d, masters, step), tag / "optim" / rank_file_name(d, *rank), xser
            )
    for marker in ("checkpoint", "done"):
        (tag / marker).write_text("1")
    return tag


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    state = torch.load(file)
    torch.save(change(state) or state, file)


# Reading


def assert_same(state: TrainingState, expected: State) -> None:
    assert state.dtypes.keys() == expected.keys()
    for kind, tensors in expected.items():
        for name, value in tensors.items():
            read = state.read(kind, TensorSlice.full(name, tuple(value.shape)))
            assert read.dtype == value.dtype == state.dtypes[kind]
            assert torch.equal(read, value), (kind, name)


def with_bf16_weights(expected: State) -> State:
    return {**expected, "weights": {name: value.bfloat16() for name, value in expected["weights"].items()}}


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize(
    ("tp", "replicas", "pp", "dp", "xser"),
    [
        (1, 1, 1, 1, False),
        pytest.param(1, 1, 1, 3, True, marks=pytest.mark.nightly),
        pytest.param(2, 1, 1, 2, False, marks=pytest.mark.nightly),
        (2, 1, 2, 3, False),
        pytest.param(2, 2, 1, 3, False, marks=pytest.mark.nightly),
        (4, 2, 1, 2, True),
        pytest.param(4, 4, 2, 3, False, marks=pytest.mark.nightly),
    ],
)
def test_every_tensor_is_read_bit_for_bit(
    tp: int, replicas: int, pp: int, dp: int, xser: bool, masters: bool, tmp_path: Path
) -> None:
    model = llama()
    expected = random_state(model)
    groups = one_group if masters else two_groups
    options: dict[str, Any] = {"tp": tp, "replicas": replicas, "pp": pp, "dp": dp, "xser": xser, "masters": masters}
    tag = write_checkpoint(tmp_path / "step_100", model, expected, groups=groups, **options)
    state = open_nxd_state(tag, model)
    assert (state.model, state.counters) == (model, {"updates": 7, "step": 100})
    assert_same(state, expected if masters else with_bf16_weights(expected))


@pytest.mark.parametrize(
    ("tp", "replicas", "pp", "dp", "masters"), [(1, 1, 1, 1, True), (4, 2, 2, 3, True), (2, 1, 1, 2, False)]
)
def test_the_state_of_experts_is_read_bit_for_bit(
    tp: int, replicas: int, pp: int, dp: int, masters: bool, tmp_path: Path
) -> None:
    """Data-parallel ranks divide the experts, of which no dp has an equal number."""
    model = mixtral()
    expected = random_state(model)
    groups = one_group if masters else two_groups
    options: dict[str, Any] = {"tp": tp, "replicas": replicas, "pp": pp, "dp": dp, "masters": masters}
    tag = write_checkpoint(tmp_path / "step_100", model, expected, groups=groups, **options)
    assert_same(open_nxd_state(tag, model), expected if masters else with_bf16_weights(expected))


@pytest.mark.parametrize(
    "name", ["dp_rank_01_tp_rank_00_pp_rank_00.pt", "dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt"]
)
def test_state_with_expert_parallelism_is_refused(name: str, tmp_path: Path) -> None:
    """With and without ZeRO-1. The weights can be read."""
    model = mixtral()
    tag = write(tmp_path / "step_1", RandomWeights(model), NxdLayout(ep=5))
    (tag / "optim").mkdir()
    (tag / "optim" / name).touch()
    opened = open_weights(tag, model)
    assert opened.open_state
    with pytest.raises(
        UserError, match=r"step_1: optimizer state with ep_size=5 is not supported, .*; use --weights-only$"
    ):
        opened.open_state()
    spec = ConversionTarget("native", {}, weights_only=True)
    convert_checkpoint(opened, tag, tmp_path / "native", spec, lambda size: None)
    native = open_weights(tmp_path / "native").weights
    for piece in unfused_tensors(model).values():
        assert torch.equal(native.read(piece), opened.weights.read(piece))


@examples(12)
@given(case=cases(), dp=st.integers(1, 3), masters=st.booleans(), single_group=st.booleans())
def test_any_layout_of_the_model(
    case: tuple[LlamaConfig, NxdLayout], dp: int, masters: bool, single_group: bool
) -> None:
    """Fused matrices, both styles, virtual stages, tied heads: the optimizer's tensors are sharded as the model's."""
    model, layout = case
    expected = {
        kind: {p: v.bfloat16().float() for p, v in tensors.items()} for kind, tensors in random_state(model).items()
    }
    with TemporaryDirectory() as folder:
        for kind, tensors in expected.items():
            source = RandomWeights(model)
            source.tensors = tensors
            write(Path(folder) / kind, source, layout)
        tag = Path(folder) / "weights"
        for rank in [(t, p) for p in range(layout.pp) for t in range(layout.tp)]:
            local = {kind: load_rank(Path(folder) / kind, *rank) for kind in expected}
            names = list(local["weights"])
            if model.tie_embeddings and layout.pp == 1:
                names.pop()
            for d in range(dp):
                shard = zero1_state(local, (one_group if single_group else two_groups)(names), dp, d, masters, 7)
                save(shard, tag / "optim" / rank_file_name(d, *rank))
        hints = {"by_head": layout.by_head, "kv_order": layout.kv_order}
        assert_same(open_nxd_state(tag, model, hints), expected)


@pytest.mark.parametrize(("tp", "dp"), [(1, 5), (2, 3), (8, 2)])
def test_ranks_of_another_layout_read_their_slices(tp: int, dp: int, tmp_path: Path) -> None:
    model = llama(ffn=24, vocab=44)
    expected = random_state(model)
    state = open_nxd_state(write_checkpoint(tmp_path / "step_1", model, expected, tp=4, replicas=2, pp=2, dp=3), model)
    blueprint = models.family_of(model).blueprint(model)
    elements_read: dict[str, int] = {}
    for name in blueprint.parameter_names():
        for t in range(tp):
            for d in range(dp):
                rows = shard_rows(blueprint.local_shape(name, ModelShard(tp, t))[0], dp, d)
                for piece in rank_slices(blueprint, name, ModelShard(tp, t), rows, skip_replicas=True):
                    for kind, tensors in expected.items():
                        assert torch.equal(state.read(kind, piece), tensors[piece.name][piece.to_index()])
                    elements_read[piece.name] = elements_read.get(piece.name, 0) + piece.numel
    assert elements_read == {name: value.numel() for name, value in expected["first"].items()}


@pytest.mark.parametrize("pp", [1, 2])
def test_tied_heads(pp: int, tmp_path: Path) -> None:
    """On the embedding's rank, the head is the same parameter; on another rank, it is a copy with its own state."""
    model = llama(tie_embeddings=True)
    expected = random_state(model)
    assert_same(
        open_nxd_state(write_checkpoint(tmp_path / "step_3", model, expected, tp=2, pp=pp, dp=2), model), expected
    )


def test_only_the_files_with_the_rows_are_read(tmp_path: Path) -> None:
    model = llama()
    expected = random_state(model)
    tag = write_checkpoint(tmp_path / "step_1", model, expected, dp=3, xser=True, masters=False)
    state = open_nxd_state(tag, model)
    shutil.rmtree(tag / "optim" / f"{rank_file_name(0)}.tensors")
    shutil.rmtree(tag / "optim" / f"{rank_file_name(2)}.tensors")
    embedding = expected["first"]["embedding.weight"]  # 12 of its 36 rows in each file

    def read(start: int, stop: int) -> Tensor:
        sizes = (stop - start, 5)
        return state.read("first", TensorSlice("embedding.weight", (36, 17), (start, 2), sizes))

    assert torch.equal(read(12, 24), embedding[12:24, 2:7])
    for start, stop, file in ((11, 24, rank_file_name(0)), (12, 25, rank_file_name(2))):
        with pytest.raises(UserError, match=rf"{file}\.tensors/tensor_\d+\.pt: cannot be read"):
            read(start, stop)


def test_master_weights_are_those_of_all_ranks(tmp_path: Path) -> None:
    """NxD's reference converter keeps only the first rank's rows, sharded again. Its output is refused."""
    model = llama()
    expected = random_state(model)
    tag = write_checkpoint(tmp_path / "step_1", model, expected, dp=2)
    first_shard = torch.load(tag / "optim" / rank_file_name(0))["sharded_master_weights"]
    read = open_nxd_state(tag, model).read("weights", TensorSlice.full("embedding.weight", (36, 17)))
    assert first_shard[0].shape == (18, 17)
    assert torch.equal(read, expected["weights"]["embedding.weight"])
    assert torch.equal(read[:18], first_shard[0])
    for d in range(2):
        resharded = {param_id: zero1_rows(tensor, 2, d) for param_id, tensor in first_shard.items()}
        edit(tag / "optim" / rank_file_name(d), lambda state, new=resharded: {**state, "sharded_master_weights": new})
    message = r"sharded_master_weights of model.embed_tokens.weight is \[9, 17\], expected \[18, 17\], for"
    with pytest.raises(UserError, match=message):
        open_nxd_state(tag, model)


@pytest.mark.parametrize("xser", [False, True])
def test_the_state_of_a_torch_optimizer(xser: bool, tmp_path: Path) -> None:
    """Without ZeRO-1, there is one file per rank of the model, with the state dict of AdamW."""
    model = llama()
    expected = random_state(model)
    tag = write_checkpoint(tmp_path / "step_3", model, expected)
    parameters = {name: torch.nn.Parameter(value) for name, value in load_rank(tag).items()}
    groups = [[parameters[name] for name in group] for group in two_groups(list(parameters))]
    optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}])
    for _ in range(3):
        for value in parameters.values():
            value.grad = torch.randn_like(value)
        optimizer.step()
    shutil.rmtree(tag / "optim")
    save(optimizer.state_dict(), tag / "optim" / rank_file_name(0), xser)
    state = open_nxd_state(tag, model)
    assert (state.counters["updates"], state.dtypes["first"], state.dtypes["weights"]) == (
        3,
        torch.float32,
        torch.bfloat16,
    )
    norm, down = parameters["model.norm.weight"], parameters["model.layers.2.mlp.down_proj.weight"]
    gate_up = parameters["model.layers.1.mlp.gate_up_proj.weight"]
    for kind, key in (("first", "exp_avg"), ("second", "exp_avg_sq")):
        for name, value in (
            ("norm.weight", optimizer.state[norm][key]),
            ("layers.2.mlp.down.weight", optimizer.state[down][key]),
            ("layers.1.mlp.up.weight", optimizer.state[gate_up][key][20:]),
        ):
            assert torch.equal(state.read(kind, TensorSlice.full(name, tuple(value.shape))), value.float())


def test_state_saved_in_other_precisions(tmp_path: Path) -> None:
    """With XLA_DOWNCAST_BF16, fp64 stands for fp32 and fp32 for bf16. Steps are numbers or tensors."""
    model = llama()
    expected = random_state(model)
    wide = {kind: {name: value.double() for name, value in tensors.items()} for kind, tensors in expected.items()}
    tag = write_checkpoint(tmp_path / "step_3", model, wide, dp=2, step=torch.tensor(7.0))
    edit(tag / "model" / rank_file_name(0), lambda state: {name: value.float() for name, value in state.items()})
    state = open_nxd_state(tag, model)
    assert state.counters["updates"] == 7
    assert_same(state, expected)


# Finding files


def test_the_checkpoint_is_found_by_any_of_its_directories(tmp_path: Path) -> None:
    model = llama()
    expected = random_state(model)
    tag = write_checkpoint(tmp_path / "run" / "step_5", model, expected, tp=2, dp=2, xser=True)
    for path in (tag, tag / "model", tag.parent):
        assert find_optimizer(path) == {
            (0, 0, tp): tuple(tag / "optim" / rank_file_name(dp, tp) for dp in range(2)) for tp in range(2)
        }  # no .tensors directories, no .info.pt files
    assert find_optimizer(tmp_path) is None
    (tag / "optim").rename(tag / "gone")
    assert find_optimizer(tag) is None
    with pytest.raises(UserError, match="step_5: has no optimizer state"):
        open_nxd_state(tag, model)
    (tag / "optim").mkdir()
    assert find_optimizer(tag) is None
    (tag / "optim" / "__0_0.distcp").touch()
    with pytest.raises(UserError, match=r"has __0_0.distcp, but no dp_rank_00.* use_zero1_dcp .* is not supported"):
        find_optimizer(tag)


@pytest.mark.parametrize("where", ["", "optim", "model"])
def test_file_names_of_old_versions(where: str, tmp_path: Path) -> None:
    model = llama()
    expected = random_state(model)
    tag = write_checkpoint(tmp_path / "out", model, expected, tp=2, dp=2)
    for dp in range(2):
        for tp in range(2):
            (tag / "optim" / rank_file_name(dp, tp)).rename(tag / where / f"optim.dp_rank_{dp:02d}.tp_rank_{tp:02d}")
    state = open_nxd_state(tag, model)
    assert "step" not in state.counters
    assert_same(state, expected)


def test_the_step_is_found_in_the_tag_or_in_counter_files(tmp_path: Path) -> None:
    model = llama(layers=3)
    tag = write_checkpoint(tmp_path / "step_100", model, random_state(model))
    names = {"llama--step=5-consumed_samples=160.0.ckpt": 5, "epoch=1-step_7-last": 7, "latest": None}
    for name, step in names.items():
        tag = tag.rename(tmp_path / name)
        assert open_nxd_state(tag, model).counters.get("step") == step
    contents: dict[str, list[tuple[Any, int | None]]] = {
        "scheduler.pt": [({"last_epoch": 11, "verbose": False}, 11), ({"last_epoch": "x"}, None), ([1], None)],
        "user_content.pt": [({"total_steps": 12, "args": Path("x")}, 12), ({"global_step": 13, "epoch": 0}, 13)],
    }
    for file, found in contents.items():
        for content, step in found:
            torch.save(content, tag / file)
            assert open_nxd_state(tag, model).counters.get("step") == step
    (tag / "user_content.pt").write_bytes(b"no pickle")
    assert "step" not in open_nxd_state(tag, model).counters


# Invalid state


def drop(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {name: value for name, value in state.items() if name != key}


def swap(state: dict[str, Any]) -> None:
    """Swap the keys and values of layer 1, which have the same shape."""
    for entries in (state["base_state"], state["sharded_master_weights"]):
        entries[10], entries[11] = entries[11], entries[10]


def reverse(state: dict[str, Any]) -> None:
    for key in ("base_state", "shape_info", "sharded_master_weights"):
        state[key] = dict(enumerate(reversed(state[key].values())))


def keep_one_row(state: dict[str, Any]) -> None:
    """What NxDT saves unless model.wrap_with_zero is set: one rank's rows only."""
    for param_id, entry in state["base_state"].items():
        state["base_state"][param_id] = {"step": 7, **{key: entry[key][:1] for key in ("exp_avg", "exp_avg_sq")}}


def add_parameter(state: dict[str, Any]) -> None:
    for key in ("base_state", "shape_info", "sharded_master_weights"):
        state[key][27] = state[key][26]
    state["param_groups"][0]["params"].append(27)


INVALID_STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    r"in the model's order the master weights of model.layers.1.self_attn.qkv_proj.weight_k differ from its weights; "
    r"in the order of decay and no decay parameter 7 is \S+ \[32, 17\], but has shape \[17\]": swap,
    r"does not fit its model file: in the model's order parameter 1 is \S+weight_q \[32, 17\], but has shape "
    r"\[17\]; in the order of decay and no decay parameter 1 is": reverse,
    r"exp_avg of model.embed_tokens.weight is \[1, 17\], expected \[36, 17\], for \[36, 17\] sharded over 1 file": (
        keep_one_row
    ),
    r"has 28 parameters, its model file 27; expected a run that trains all parameters": add_parameter,
    r"holds no state for 27 of its 27 parameters; it was saved before": lambda state: {**state, "base_state": {}},
    r"not the state of an Adam optimizer as NxD saves it: KeyError 'exp_avg'": lambda state: {
        **state,
        "base_state": {param_id: {"momentum_buffer": torch.ones(1)} for param_id in range(27)},
    },
    r"not the state .* KeyError 'step'": lambda state: {
        **state,
        "base_state": {param_id: drop("step")(entry) for param_id, entry in state["base_state"].items()},
    },
    r"not the state .* KeyError 'shape_info'": drop("shape_info"),
    r"not the state .* KeyError 'param_groups'": drop("param_groups"),
    r"not the state .* TypeError": lambda state: [1, 2],
    r"a value is not a tensor": lambda state: {
        **state,
        "sharded_master_weights": dict.fromkeys(range(27), 1.0),
    },
}


@pytest.mark.parametrize("message", INVALID_STATES)
def test_invalid_state_is_refused_in_one_line(message: str, tmp_path: Path) -> None:
    model = llama()
    tag = write_checkpoint(tmp_path / "step_1", model, random_state(model))
    edit(tag / "optim" / rank_file_name(0), INVALID_STATES[message])
    with pytest.raises(UserError, match=message) as error:
        open_nxd_state(tag, model)
    assert "\n" not in str(error.value)
    assert rank_file_name(0) in str(error.value)


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    model = llama()
    tag = write_checkpoint(tmp_path / "step_1", model, random_state(model), tp=2, pp=2, dp=2)
    (tag / "optim" / rank_file_name(1, 0, 1)).unlink()
    with pytest.raises(UserError, match=r"optim: 1 of 8 files are missing: dp_rank_01_tp_rank_00_pp_rank_01$"):
        open_nxd_state(tag, model)
    for dp in range(2):
        (tag / "optim" / rank_file_name(dp, 1, 0)).unlink()
    with pytest.raises(UserError, match=r"3 of 8 files are missing: dp_rank_00_tp_rank_01_pp_rank_00, dp_rank_01"):
        open_nxd_state(tag, model)
    (tag / "optim" / rank_file_name(0, 2, 0)).touch()
    with pytest.raises(UserError, match=r"has tp_rank_02_pp_rank_00, which the model's files do not have"):
        open_nxd_state(tag, model)
    (tag / "optim" / rank_file_name(0, 2, 0)).rename(tag / "optim" / "dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt")
    with pytest.raises(UserError, match=r"has ep_rank_01_tp_rank_00_pp_rank_00, which the model's files do not have"):
        open_nxd_state(tag, model)


@pytest.mark.parametrize(
    ("options", "seed", "message"),
    [
        ({"masters": False}, 1, rf"{rank_file_name(1)}: has no sharded_master_weights, but {rank_file_name(0)} has"),
        ({"step": 8}, 1, rf"{rank_file_name(1)}: is of update 8, {rank_file_name(0)} of 7"),
        (
            {"groups": two_groups},
            1,
            rf"{rank_file_name(1)}: its parameters have other shapes than those of {rank_file_name(0)}",
        ),
        ({}, 2, r"the master weights of model.embed_tokens.weight differ from its weights"),
    ],
)
def test_a_file_of_another_checkpoint_is_refused(
    options: dict[str, Any], seed: int, message: str, tmp_path: Path
) -> None:
    model = llama(vocab=600)  # more rows than are sampled
    tag = write_checkpoint(tmp_path / "step_1", model, random_state(model), dp=2)
    other = write_checkpoint(tmp_path / "step_2", model, random_state(model, seed), dp=2, **options)
    shutil.copy(other / "optim" / rank_file_name(1), tag / "optim" / rank_file_name(1))
    with pytest.raises(UserError, match=message):
        open_nxd_state(tag, model)


@pytest.mark.parametrize("keep", [0, 3, 1000, -40])
def test_truncated_files_are_refused(keep: int, tmp_path: Path) -> None:
    model = llama()
    tag = write_checkpoint(tmp_path / "step_1", model, random_state(model), dp=2)
    file = tag / "optim" / rank_file_name(1)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=rf"{rank_file_name(1)}: ") as error:
        open_nxd_state(tag, model)
    assert "\n" not in str(error.value)
