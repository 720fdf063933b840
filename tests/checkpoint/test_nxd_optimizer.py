"""Optimizer state of NxD runs: moments and master weights of every part, bit for bit, from any tp, pp and dp."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.checkpoint.test_nxd import Memory, cases, loaded, written
from trainyard import models
from trainyard.checkpoint.formats.nxd.layout import NxdLayout
from trainyard.checkpoint.formats.nxd.optimizer import NxdTrainingState, find_optimizer, open_nxd_state
from trainyard.checkpoint.formats.tensor_map import unfused_tensors
from trainyard.checkpoint.native.partition import rank_slices
from trainyard.config.model_schema import LlamaConfig
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorSlice
from trainyard.parallel.layout import shard_rows

# A checkpoint as NxD leaves it, by plain torch

Parts = dict[str, Tensor]
Kinds = dict[str, Parts]
Rank = tuple[int, int, int]
"""Data-parallel, tensor-parallel, pipeline."""
STAGES = {1: [[0, 1, 2]], 2: [[0], [1, 2]]}


def llama(**changes: Any) -> LlamaConfig:
    """Rows that no dp divides: 17 wide, 9 words on each of 4 ranks."""
    base = {"vocab": 36, "hidden": 17, "layers": 3, "heads": 8, "kv_heads": 2, "head_dim": 4, "ffn": 20}
    return LlamaConfig(family="llama", max_positions=32, **{**base, **changes})


def made(model: LlamaConfig, seed: int = 1) -> Kinds:
    """Master weights and moments, no two alike."""
    generator = torch.Generator().manual_seed(seed)
    tensors = unfused_tensors(model).items()
    return {
        kind: {name: torch.randn(tensor.sizes, generator=generator) for name, tensor in tensors}
        for kind in ("weights", "first", "second")
    }


def on_rank(parts: Parts, model: LlamaConfig, tp: int, pp: int, times: int, rank: tuple[int, int]) -> Parts:
    """The tensors of NxD's Llama model (qkv_linear, trn1) on a rank, in the order of its modules."""
    r, stage = rank
    by_slot = (model.num_kv_heads, times, model.heads // model.num_kv_heads // times * model.head_size, model.hidden)
    out: Parts = {}
    if stage == 0:
        out["model.embed_tokens.weight"] = parts["embedding.weight"].chunk(tp)[r]
    for i in STAGES[pp][stage]:
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        q, k, v, o = (parts[f"{ours}attention.{x}.weight"] for x in ("q", "k", "v", "output"))
        mixed = q.view(by_slot).transpose(0, 1).reshape(q.shape)
        columns = o.T.reshape(by_slot).transpose(0, 1).reshape(q.shape).T
        out[f"{theirs}self_attn.qkv_proj.weight_q"] = mixed.chunk(tp)[r]
        out[f"{theirs}self_attn.qkv_proj.weight_k"] = k.repeat(times, 1).chunk(tp)[r]
        out[f"{theirs}self_attn.qkv_proj.weight_v"] = v.repeat(times, 1).chunk(tp)[r]
        out[f"{theirs}self_attn.o_proj.weight"] = columns.chunk(tp, 1)[r]
        gate, up = (parts[f"{ours}mlp.{x}.weight"].chunk(tp)[r] for x in ("gate", "up"))
        out[f"{theirs}mlp.gate_up_proj.weight"] = torch.cat([gate, up])
        out[f"{theirs}mlp.down_proj.weight"] = parts[f"{ours}mlp.down.weight"].chunk(tp, 1)[r]
        out[f"{theirs}input_layernorm.weight"] = parts[f"{ours}attention_norm.weight"]
        out[f"{theirs}post_attention_layernorm.weight"] = parts[f"{ours}mlp_norm.weight"]
    if stage == pp - 1:
        out["model.norm.weight"] = parts["norm.weight"]
        out["lm_head.weight"] = parts["embedding.weight" if model.tie_embeddings else "output.weight"].chunk(tp)[r]
    return {name: value.clone() for name, value in out.items()}


def one_group(names: list[str]) -> list[list[str]]:
    """NxD's and NxDT's examples look for LayerNorm, which no name of a Llama model has: the second group is empty."""
    return [[name for name in names if "LayerNorm" not in name], [name for name in names if "LayerNorm" in name]]


def two_groups(names: list[str]) -> list[list[str]]:
    return [[name for name in names if "norm" not in name], [name for name in names if "norm" in name]]


def rows(tensor: Tensor, dp: int, rank: int) -> Tensor:
    """As torch-xla's ZeroRedundancyOptimizer has them."""
    padding = [0, 0] * (tensor.dim() - 1) + [0, -len(tensor) % dp]
    return F.pad(tensor, padding).chunk(dp)[rank].clone()


def zero1(held: Kinds, groups: list[list[str]], dp: int, rank: int, masters: bool, step: Any) -> dict[str, Any]:
    names = [name for group in groups for name in group]
    numbers = iter(range(len(names)))
    share = {kind: [rows(tensors[name], dp, rank) for name in names] for kind, tensors in held.items()}
    return {
        "state": {},
        "param_groups": [{"lr": 1e-4, "params": [next(numbers) for _ in group]} for group in groups],
        "base_state": {
            i: {"step": step, "exp_avg": share["first"][i], "exp_avg_sq": share["second"][i]} for i in range(len(names))
        },
        "shape_info": {i: held["first"][name].shape for i, name in enumerate(names)},
        **({"sharded_master_weights": dict(enumerate(share["weights"]))} if masters else {}),
    }


@contextmanager
def torch_xla() -> Iterator[Any]:
    """Its class of references, as if it were installed."""
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

    def referring(each: Any) -> Any:
        if isinstance(each, Tensor):
            made = reference()
            made.tid = len(tensors)
            torch.save(each, folder / f"tensor_{made.tid}.pt")
            tensors.append(each)
            return made
        if isinstance(each, dict):
            return {key: referring(held) for key, held in each.items()}
        return [referring(held) for held in each] if type(each) is list else each

    with torch_xla() as reference:
        torch.save(referring(value), path)
    info = {tid: {"dtype": tensor.dtype, "shape": tensor.shape} for tid, tensor in enumerate(tensors)}
    torch.save(info, f"{path}.info.pt")


def file_of(dp: int, tp: int = 0, pp: int = 0) -> str:
    return f"dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


def checkpoint(
    tag: Path,
    model: LlamaConfig,
    kinds: Kinds,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    times: int = 1,
    xser: bool = False,
    masters: bool = True,
    groups: Callable[[list[str]], list[list[str]]] = one_group,
    step: Any = 7,
) -> Path:
    for rank in [(t, p) for p in range(pp) for t in range(tp)]:
        held = {kind: on_rank(parts, model, tp, pp, times, rank) for kind, parts in kinds.items()}
        weights = {name: value.bfloat16() for name, value in held["weights"].items()}
        save(weights, tag / "model" / file_of(0, *rank), xser)
        names = list(weights)
        if model.tie_embeddings and "model.embed_tokens.weight" in names and "lm_head.weight" in names:
            names.remove("lm_head.weight")  # parameters() has what is shared once
        for d in range(dp):
            save(zero1(held, groups(names), dp, d, masters, step), tag / "optim" / file_of(d, *rank), xser)
    for marker in ("checkpoint", "done"):
        (tag / marker).write_text("1")
    return tag


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    state = torch.load(file)
    torch.save(change(state) or state, file)


# What is read


def same(state: NxdTrainingState, kinds: Kinds) -> None:
    assert state.dtypes.keys() == kinds.keys()
    for kind, parts in kinds.items():
        for part, wanted in parts.items():
            found = state.read_state(kind, TensorSlice.full(part, tuple(wanted.shape)))
            assert found.dtype == wanted.dtype == state.dtypes[kind]
            assert torch.equal(found, wanted), (kind, part)


def halved(kinds: Kinds) -> Kinds:
    return {**kinds, "weights": {part: value.bfloat16() for part, value in kinds["weights"].items()}}


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize(
    ("tp", "times", "pp", "dp", "xser"),
    [
        (1, 1, 1, 1, False),
        (1, 1, 1, 3, True),
        (2, 1, 1, 2, False),
        (2, 1, 2, 3, False),
        (2, 2, 1, 3, False),
        (4, 2, 1, 2, True),
        (4, 4, 2, 3, False),
    ],
)
def test_every_part_is_read_bit_for_bit(
    tp: int, times: int, pp: int, dp: int, xser: bool, masters: bool, tmp_path: Path
) -> None:
    model = llama()
    kinds = made(model)
    groups = one_group if masters else two_groups
    options: dict[str, Any] = {"tp": tp, "times": times, "pp": pp, "dp": dp, "xser": xser, "masters": masters}
    tag = checkpoint(tmp_path / "step_100", model, kinds, groups=groups, **options)
    state = open_nxd_state(tag, model)
    assert (state.model, state.updates, state.step) == (model, 7, 100)
    same(state, kinds if masters else halved(kinds))


@settings(max_examples=12, deadline=None)
@given(case=cases(), dp=st.integers(1, 3), masters=st.booleans(), plain=st.booleans())
def test_any_layout_of_the_model(case: tuple[LlamaConfig, NxdLayout], dp: int, masters: bool, plain: bool) -> None:
    """Fused matrices, both styles, virtual stages, tied heads: the optimizer's tensors lie as the model's."""
    model, layout = case
    kinds = {kind: {p: v.bfloat16().float() for p, v in parts.items()} for kind, parts in made(model).items()}
    with TemporaryDirectory() as folder:
        for kind, parts in kinds.items():
            memory = Memory(model)
            memory.parts = parts
            written(Path(folder) / kind, memory, layout)
        tag = Path(folder) / "weights"
        for rank in [(t, p) for p in range(layout.pp) for t in range(layout.tp)]:
            held = {kind: loaded(Path(folder) / kind, *rank) for kind in kinds}
            names = list(held["weights"])
            if model.tie_embeddings and layout.pp == 1:
                names.pop()
            for d in range(dp):
                share = zero1(held, (one_group if plain else two_groups)(names), dp, d, masters, 7)
                save(share, tag / "optim" / file_of(d, *rank))
        hints = {"by_head": layout.by_head, "kv_order": layout.kv_order}
        same(open_nxd_state(tag, model, hints), kinds)


@pytest.mark.parametrize(("tp", "dp"), [(1, 5), (2, 3), (8, 2)])
def test_ranks_of_another_layout_read_their_own(tp: int, dp: int, tmp_path: Path) -> None:
    model = llama(ffn=24, vocab=44)
    kinds = made(model)
    state = open_nxd_state(checkpoint(tmp_path / "step_1", model, kinds, tp=4, times=2, pp=2, dp=3), model)
    blueprint = models.family_of(model).blueprint(model)
    seen: dict[str, int] = {}
    for name in blueprint.parameter_names():
        for t in range(tp):
            for d in range(dp):
                share = shard_rows(blueprint.local_shape(name, tp, t)[0], dp, d)
                for box in rank_slices(blueprint, name, tp, t, share, skip_replicas=True):
                    for kind, parts in kinds.items():
                        assert torch.equal(state.read_state(kind, box), parts[box.name][box.to_index()])
                    seen[box.name] = seen.get(box.name, 0) + box.numel
    assert seen == {part: value.numel() for part, value in kinds["first"].items()}


@pytest.mark.parametrize("pp", [1, 2])
def test_tied_heads(pp: int, tmp_path: Path) -> None:
    """On the embedding's rank the head is the same parameter, on another one it is a copy with a state of its own."""
    model = llama(tie_embeddings=True)
    kinds = made(model)
    same(open_nxd_state(checkpoint(tmp_path / "step_3", model, kinds, tp=2, pp=pp, dp=2), model), kinds)


def test_only_the_files_with_the_rows_are_read(tmp_path: Path) -> None:
    model = llama()
    kinds = made(model)
    tag = checkpoint(tmp_path / "step_1", model, kinds, dp=3, xser=True, masters=False)
    state = open_nxd_state(tag, model)
    shutil.rmtree(tag / "optim" / f"{file_of(0)}.tensors")
    shutil.rmtree(tag / "optim" / f"{file_of(2)}.tensors")
    embedding = kinds["first"]["embedding.weight"]  # 12 of its 36 rows in each file

    def read(start: int, stop: int) -> Tensor:
        sizes = (stop - start, 5)
        return state.read_state("first", TensorSlice("embedding.weight", (36, 17), (start, 2), sizes))

    assert torch.equal(read(12, 24), embedding[12:24, 2:7])
    for start, stop, file in ((11, 24, file_of(0)), (12, 25, file_of(2))):
        with pytest.raises(UserError, match=rf"{file}\.tensors/tensor_\d+\.pt: cannot be read"):
            read(start, stop)


def test_master_weights_are_those_of_all_ranks(tmp_path: Path) -> None:
    """The reference's converter keeps the first rank's rows of them, shared out again. What it leaves is refused."""
    model = llama()
    kinds = made(model)
    tag = checkpoint(tmp_path / "step_1", model, kinds, dp=2)
    theirs = torch.load(tag / "optim" / file_of(0))["sharded_master_weights"][0]
    ours = open_nxd_state(tag, model).read_state("weights", TensorSlice.full("embedding.weight", (36, 17)))
    assert theirs.shape == (18, 17)
    assert torch.equal(ours, kinds["weights"]["embedding.weight"])
    assert torch.equal(ours[:18], theirs)
    first = torch.load(tag / "optim" / file_of(0))["sharded_master_weights"]
    for d in range(2):
        again = {number: rows(tensor, 2, d) for number, tensor in first.items()}
        edit(tag / "optim" / file_of(d), lambda state, again=again: {**state, "sharded_master_weights": again})
    with pytest.raises(
        UserError, match=r"sharded_master_weights of model.embed_tokens.weight is \[9, 17\], wanted \[18, 17\], for"
    ):
        open_nxd_state(tag, model)


@pytest.mark.parametrize("xser", [False, True])
def test_the_state_of_a_torch_optimizer(xser: bool, tmp_path: Path) -> None:
    """Without ZeRO-1 there is one file for each rank of the model, with AdamW's own state in it."""
    model = llama()
    kinds = made(model)
    tag = checkpoint(tmp_path / "step_3", model, kinds)
    held = {name: torch.nn.Parameter(value) for name, value in loaded(tag).items()}
    groups = [[held[name] for name in group] for group in two_groups(list(held))]
    optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}])
    for _ in range(3):
        for value in held.values():
            value.grad = torch.randn_like(value)
        optimizer.step()
    shutil.rmtree(tag / "optim")
    save(optimizer.state_dict(), tag / "optim" / file_of(0), xser)
    state = open_nxd_state(tag, model)
    assert (state.updates, state.dtypes["first"], state.dtypes["weights"]) == (3, torch.float32, torch.bfloat16)
    norm, down = held["model.norm.weight"], held["model.layers.2.mlp.down_proj.weight"]
    gate_up = held["model.layers.1.mlp.gate_up_proj.weight"]
    for kind, name in (("first", "exp_avg"), ("second", "exp_avg_sq")):
        for part, wanted in (
            ("norm.weight", optimizer.state[norm][name]),
            ("layers.2.mlp.down.weight", optimizer.state[down][name]),
            ("layers.1.mlp.up.weight", optimizer.state[gate_up][name][20:]),
        ):
            assert torch.equal(state.read_state(kind, TensorSlice.full(part, tuple(wanted.shape))), wanted.float())


def test_what_other_precisions_leave(tmp_path: Path) -> None:
    """With XLA_DOWNCAST_BF16 fp64 stands for fp32 and fp32 for bf16; steps are numbers, or tensors of one."""
    model = llama()
    kinds = made(model)
    wide = {kind: {part: value.double() for part, value in parts.items()} for kind, parts in kinds.items()}
    tag = checkpoint(tmp_path / "step_3", model, wide, dp=2, step=torch.tensor(7.0))
    edit(tag / "model" / file_of(0), lambda state: {name: value.float() for name, value in state.items()})
    state = open_nxd_state(tag, model)
    assert state.updates == 7
    same(state, kinds)


# Where the files are


def test_names_of_files(tmp_path: Path) -> None:
    model = llama()
    kinds = made(model)
    tag = checkpoint(tmp_path / "run" / "step_5", model, kinds, tp=2, dp=2, xser=True)
    for path in (tag, tag / "model", tag.parent):
        found = find_optimizer(path)
        assert found
        assert found.root == tag / "optim"
        assert found.files == {
            (0, tp): tuple(tag / "optim" / file_of(dp, tp) for dp in range(2)) for tp in range(2)
        }  # no .tensors, no .info.pt
    assert find_optimizer(tmp_path) is None
    (tag / "optim").rename(tag / "gone")
    assert find_optimizer(tag) is None
    with pytest.raises(UserError, match="step_5: has no optimizer state"):
        open_nxd_state(tag, model)
    (tag / "optim").mkdir()
    assert find_optimizer(tag) is None
    (tag / "optim" / "__0_0.distcp").touch()
    with pytest.raises(UserError, match=r"has __0_0.distcp, but no dp_rank_00.* use_zero1_dcp .* is not read"):
        find_optimizer(tag)


@pytest.mark.parametrize("where", ["", "optim", "model"])
def test_deprecated_names(where: str, tmp_path: Path) -> None:
    model = llama()
    kinds = made(model)
    tag = checkpoint(tmp_path / "out", model, kinds, tp=2, dp=2)
    for dp in range(2):
        for tp in range(2):
            (tag / "optim" / file_of(dp, tp)).rename(tag / where / f"optim.dp_rank_{dp:02d}.tp_rank_{tp:02d}")
    state = open_nxd_state(tag, model)
    assert state.step is None
    same(state, kinds)


def test_the_step_of_a_run(tmp_path: Path) -> None:
    model = llama(layers=3)
    tag = checkpoint(tmp_path / "step_100", model, made(model))
    names = {"llama--step=5-consumed_samples=160.0.ckpt": 5, "epoch=1-step_7-last": 7, "latest": None}
    for name, step in names.items():
        tag = tag.rename(tmp_path / name)
        assert open_nxd_state(tag, model).step == step
    contents: dict[str, list[tuple[Any, int | None]]] = {
        "scheduler.pt": [({"last_epoch": 11, "verbose": False}, 11), ({"last_epoch": "x"}, None), ([1], None)],
        "user_content.pt": [({"total_steps": 12, "args": Path("x")}, 12), ({"global_step": 13, "epoch": 0}, 13)],
    }
    for file, found in contents.items():
        for content, step in found:
            torch.save(content, tag / file)
            assert open_nxd_state(tag, model).step == step
    (tag / "user_content.pt").write_bytes(b"no pickle")
    assert open_nxd_state(tag, model).step is None


# Mistakes


def drop(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {name: value for name, value in state.items() if name != key}


def swapped(state: dict[str, Any]) -> None:
    """The keys and values of layer 1, which have one shape."""
    for held in (state["base_state"], state["sharded_master_weights"]):
        held[10], held[11] = held[11], held[10]


def backwards(state: dict[str, Any]) -> None:
    for key in ("base_state", "shape_info", "sharded_master_weights"):
        state[key] = dict(enumerate(reversed(state[key].values())))


def without_rows(state: dict[str, Any]) -> None:
    """What NxDT leaves unless model.wrap_with_zero is set: a rank's rows as if they were all."""
    for number, held in state["base_state"].items():
        state["base_state"][number] = {"step": 7, **{key: held[key][:1] for key in ("exp_avg", "exp_avg_sq")}}


def longer(state: dict[str, Any]) -> None:
    for key in ("base_state", "shape_info", "sharded_master_weights"):
        state[key][27] = state[key][26]
    state["param_groups"][0]["params"].append(27)


WRONGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    r"in the model's order the master weights of model.layers.1.self_attn.qkv_proj.weight_k are not its weights; "
    r"in the order of decay and no decay number 7 would be \S+ \[32, 17\], but is \[17\]": swapped,
    r"does not fit the model file beside it: in the model's order number 1 would be \S+weight_q \[32, 17\], but is "
    r"\[17\]; in the order of decay and no decay number 1 would be": backwards,
    r"exp_avg of model.embed_tokens.weight is \[1, 17\], wanted \[36, 17\], for \[36, 17\] shared out to 1 files": (
        without_rows
    ),
    r"has 28 parameters, its model file 27; a run that trains all of the model was expected": longer,
    r"holds no state for 27 of its 27 parameters; it was saved before": lambda state: {**state, "base_state": {}},
    r"not the state of an Adam optimizer as NxD saves it: KeyError 'exp_avg'": lambda state: {
        **state,
        "base_state": {number: {"momentum_buffer": torch.ones(1)} for number in range(27)},
    },
    r"not the state .* KeyError 'step'": lambda state: {
        **state,
        "base_state": {number: drop("step")(held) for number, held in state["base_state"].items()},
    },
    r"not the state .* KeyError 'shape_info'": drop("shape_info"),
    r"not the state .* KeyError 'param_groups'": drop("param_groups"),
    r"not the state .* TypeError": lambda state: [1, 2],
    r"something else where a tensor should be": lambda state: {
        **state,
        "sharded_master_weights": dict.fromkeys(range(27), 1.0),
    },
}


@pytest.mark.parametrize("says", WRONGS)
def test_what_does_not_fit_is_told_in_one_line(says: str, tmp_path: Path) -> None:
    model = llama()
    tag = checkpoint(tmp_path / "step_1", model, made(model))
    edit(tag / "optim" / file_of(0), WRONGS[says])
    with pytest.raises(UserError, match=says) as error:
        open_nxd_state(tag, model)
    assert "\n" not in str(error.value)
    assert file_of(0) in str(error.value)


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    model = llama()
    tag = checkpoint(tmp_path / "step_1", model, made(model), tp=2, pp=2, dp=2)
    (tag / "optim" / file_of(1, 0, 1)).unlink()
    with pytest.raises(UserError, match=r"optim: 1 of 8 files are missing: dp_rank_01_tp_rank_00_pp_rank_01$"):
        open_nxd_state(tag, model)
    for dp in range(2):
        (tag / "optim" / file_of(dp, 1, 0)).unlink()
    with pytest.raises(UserError, match=r"3 of 8 files are missing: dp_rank_00_tp_rank_01_pp_rank_00, dp_rank_01"):
        open_nxd_state(tag, model)
    (tag / "optim" / file_of(0, 2, 0)).touch()
    with pytest.raises(UserError, match=r"has tp_rank_02_pp_rank_00, which the model's files do not have"):
        open_nxd_state(tag, model)
    (tag / "optim" / "dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt").touch()
    with pytest.raises(UserError, match="mixture of experts"):
        open_nxd_state(tag, model)


@pytest.mark.parametrize(
    ("options", "seed", "says"),
    [
        ({"masters": False}, 1, rf"{file_of(1)}: has no sharded_master_weights, but {file_of(0)} has"),
        ({"step": 8}, 1, rf"{file_of(1)}: is of update 8, {file_of(0)} of 7"),
        ({"groups": two_groups}, 1, rf"{file_of(1)}: its parameters have other shapes than those of {file_of(0)}"),
        ({}, 2, r"the master weights of model.embed_tokens.weight are not its weights"),
    ],
)
def test_a_file_of_another_checkpoint_is_refused(options: dict[str, Any], seed: int, says: str, tmp_path: Path) -> None:
    model = llama(vocab=600)  # more rows than are compared
    tag = checkpoint(tmp_path / "step_1", model, made(model), dp=2)
    other = checkpoint(tmp_path / "step_2", model, made(model, seed), dp=2, **options)
    shutil.copy(other / "optim" / file_of(1), tag / "optim" / file_of(1))
    with pytest.raises(UserError, match=says):
        open_nxd_state(tag, model)


@pytest.mark.parametrize("keep", [0, 3, 1000, -40])
def test_truncated_files_are_refused(keep: int, tmp_path: Path) -> None:
    model = llama()
    tag = checkpoint(tmp_path / "step_1", model, made(model), dp=2)
    file = tag / "optim" / file_of(1)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=rf"{file_of(1)}: ") as error:
        open_nxd_state(tag, model)
    assert "\n" not in str(error.value)
