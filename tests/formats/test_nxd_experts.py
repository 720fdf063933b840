"""NxD checkpoints of mixtures of experts: stacked and sharded as NxD's model expects, at any tp, pp and ep."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.rank_jobs import LossRecorder
from tests.support import configs
from tests.support.hf_reference import hf_model
from trainyard.checkpoint.weights import unfused_tensors
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorIndex
from trainyard.families.builtin.mixtral import MixtralConfig
from trainyard.families.hf_config import from_hf
from trainyard.formats.convert import ConversionTarget, convert_checkpoint, parse_layout
from trainyard.formats.io.lazy_tensor import InlineTensor
from trainyard.formats.nxd.conversion import complete_layout
from trainyard.formats.nxd.layout import NxdLayout, check_layout, rank_tensors
from trainyard.formats.nxd.rank_files import open_nxd, repack_nxd
from trainyard.formats.registry import open_weights
from trainyard.formats.tensor_map import ShardedWeights
from trainyard.run.trainer import Trainer

EXPERTS, LAYER = 6, "model.layers.1."
GATE_UP, DOWN = (f"{LAYER}mlp.expert_mlps.mlp_op.{name}_proj.weight" for name in ("gate_up", "down"))


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral that transformers wrote: 4 heads, 2 kv heads, 6 experts, hidden size 48, ffn 80."""
    directory = tmp_path_factory.mktemp("hf")
    hf_model("mixtral", num_local_experts=EXPERTS).save_pretrained(directory)
    return directory


def convert(source: Path, directory: Path, target: Any, layout: str = "", **options: Any) -> Path:
    spec = ConversionTarget(target, parse_layout(target, layout), **options)
    convert_checkpoint(open_weights(source), source, directory, spec, lambda size: None)
    return directory


def rank_path(directory: Path, ep: int | None = None, tp: int = 0, pp: int = 0) -> Path:
    """The file of a rank. `ep` None: a checkpoint without expert parallelism."""
    ep_part = "" if ep is None else f"ep_rank_{ep:02d}_"
    return directory / "model" / f"dp_rank_00_{ep_part}tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


def load(path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(path, weights_only=True)
    return state


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def is_expert(name: str) -> bool:
    return ".expert_mlps." in name


@pytest.mark.parametrize(
    ("layout", "xser"),
    [
        ("", False),
        ("tp=2,ep=2", False),
        ("tp=4,ep=3,kv_multiplier=2,qkv=qkv_linear", True),
        ("tp=4,pp=2,ep=2,kv_multiplier=2,qkv=qkv_linear,kv_order=trn2", False),
        ("pp=2,ep=6,qkv=separate", True),
        pytest.param("tp=4,pp=2,kv_multiplier=2,qkv=fused", True, marks=pytest.mark.nightly),
        pytest.param("tp=4,pp=2,ep=3,kv_multiplier=2,qkv=qkv_linear", False, marks=pytest.mark.nightly),
        pytest.param("tp=2,pp=2,ep=2,vocab=100", True, marks=pytest.mark.nightly),
    ],
)
def test_round_trips_bit_for_bit(layout: str, xser: bool, hf: Path, tmp_path: Path) -> None:
    nxd = convert(hf, tmp_path / "nxd", "nxd", layout, xser=xser)
    options = parse_layout("nxd", layout)
    model = from_hf(hf)
    assert isinstance(model, MixtralConfig)
    found = open_nxd(nxd, model).layout
    expected = complete_layout(model, options)
    assert (found.tp, found.pp, found.ep, found.kv_multiplier, found.qkv) == (
        expected.tp, expected.pp, expected.ep, expected.kv_multiplier, expected.qkv
    )  # fmt: skip
    names = {
        rank_path(nxd, ep if expected.ep > 1 else None, tp, pp).name
        for pp in range(expected.pp)
        for ep in range(expected.ep)
        for tp in range(expected.tp)
    }
    assert {path.name for path in (nxd / "model").glob("*_pp_rank_??.pt")} == names
    back = convert(nxd, tmp_path / "back", "hf")
    assert_equal(load_file(back / "model.safetensors"), load_file(hf / "model.safetensors"))


def test_a_fused_qkv_matrix_is_not_the_default() -> None:
    """NxD's Mixtral has none."""
    model = MixtralConfig(family="mixtral", vocab=8, hidden=16, layers=1, heads=4, kv_heads=2, ffn=8, max_positions=8)
    assert complete_layout(model, {"tp": 4}) == NxdLayout(tp=4, kv_multiplier=2, qkv="qkv_linear")


# The content of files, compared with tensors stacked, transposed and sharded by hand


def stacked(state: dict[str, Tensor], matrix: str, layer: int = 1) -> Tensor:
    """A matrix of all experts of a layer: w1 (gate) and w3 (up) as [experts, hidden, ffn], w2 (down) as [experts, ffn,
    hidden]."""
    prefix = f"model.layers.{layer}.block_sparse_moe.experts."
    return torch.stack([state[f"{prefix}{expert}.{matrix}.weight"].T for expert in range(EXPERTS)])


@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 3)])
def test_files_hold_a_ranks_experts_and_copies_of_the_rest(tp: int, pp: int, ep: int, hf: Path, tmp_path: Path) -> None:
    state = load_file(hf / "model.safetensors")
    nxd = convert(hf, tmp_path / "nxd", "nxd", f"tp={tp},pp={pp},ep={ep},qkv=separate")
    gate, up, down = (stacked(state, matrix) for matrix in ("w1", "w3", "w2"))
    for e in range(ep):
        for t in range(tp):
            found = load(rank_path(nxd, e if ep > 1 else None, t, pp - 1))
            gates, ups = (matrix.chunk(ep)[e].chunk(tp, 2)[t] for matrix in (gate, up))
            assert torch.equal(found[GATE_UP], torch.cat([gates, ups], 2))
            assert torch.equal(found[DOWN], down.chunk(ep)[e].chunk(tp, 1)[t])
            router = found[f"{LAYER}mlp.router.linear_router.weight"]
            assert torch.equal(router, state[f"{LAYER}block_sparse_moe.gate.weight"])
            q, o = (state[f"{LAYER}self_attn.{x}_proj.weight"] for x in "qo")
            assert torch.equal(found[f"{LAYER}self_attn.q_proj.weight"], q.chunk(tp)[t])
            assert torch.equal(found[f"{LAYER}self_attn.o_proj.weight"], o.chunk(tp, 1)[t])
            assert torch.equal(found["model.norm.weight"], state["model.norm.weight"])
            layer = [
                *(f"self_attn.{x}_proj.weight" for x in "qkvo"),
                "mlp.router.linear_router.weight",
                "mlp.expert_mlps.mlp_op.gate_up_proj.weight",
                "mlp.expert_mlps.mlp_op.down_proj.weight",
                "input_layernorm.weight",
                "post_attention_layernorm.weight",
            ]
            assert [name for name in found if name.startswith(LAYER)] == [f"{LAYER}{name}" for name in layer]


def test_files_compute_what_transformers_computes(tmp_path: Path) -> None:
    """NxD's expert layers (einsum of e...h with ehi, halves of the result are gate and up) on every rank, summed."""
    model = hf_model("mixtral", num_local_experts=EXPERTS)
    model.save_pretrained(tmp_path / "hf")
    nxd = convert(tmp_path / "hf", tmp_path / "nxd", "nxd", "tp=2,ep=3,qkv=separate")
    block = model.model.layers[1].mlp
    x_TD = torch.randn(7, 48)
    outputs = []
    for ep in range(3):
        shards = [load(rank_path(nxd, ep, tp)) for tp in range(2)]
        partial = []
        for shard in shards:
            gate, up = torch.einsum("th,ehi->eti", x_TD, shard[GATE_UP]).chunk(2, -1)
            partial.append(torch.einsum("eti,eih->eth", F.silu(gate) * up, shard[DOWN]))
        outputs.append(sum(partial))
    by_expert = torch.cat(outputs)
    logits = x_TD @ load(rank_path(nxd, 0))[f"{LAYER}mlp.router.linear_router.weight"].T
    affinities, chosen = logits.softmax(-1).topk(2)
    affinities /= affinities.sum(-1, keepdim=True)
    found = sum(affinities[:, [i]] * by_expert[chosen[:, i], torch.arange(7)] for i in range(2))
    torch.testing.assert_close(found, block(x_TD[None])[0].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ep", [1, 2])
def test_xser_marks_the_experts(ep: int, hf: Path, tmp_path: Path) -> None:
    nxd = convert(hf, tmp_path / "nxd", "nxd", f"tp=2,ep={ep}", xser=True)
    plain = convert(hf, tmp_path / "plain", "nxd", f"tp=2,ep={ep}")
    for e in range(ep):
        path = rank_path(nxd, e if ep > 1 else None, 1)
        names = list(load(rank_path(plain, e if ep > 1 else None, 1)))
        info = torch.load(f"{path}.info.pt", weights_only=False)
        marked = [name for tid, name in enumerate(names) if info[tid]["expert_model_parallel"]]
        assert marked == ([name for name in names if is_expert(name)] if ep > 1 else [])


# Reading


def test_only_the_slice_of_an_expert_is_read(hf: Path) -> None:
    model = from_hf(hf)
    assert isinstance(model, MixtralConfig)
    read: list[tuple[str, TensorIndex | None]] = []

    class Recorder(InlineTensor):
        def __init__(self, name: str, shape: tuple[int, ...]) -> None:
            super().__init__(torch.zeros(shape))
            self.name = name

        def read(self, index: TensorIndex | None = None) -> Tensor:
            read.append((self.name, index))
            return super().read(index)

    ranks = rank_tensors(model, NxdLayout(tp=2, ep=2))
    weights = ShardedWeights(
        model,
        (
            (stored, Recorder(f"{rank.ep}.{rank.tp}.{stored.name}", stored.shape))
            for rank, tensors in ranks.items()
            for stored in tensors
        ),
    )
    up, down = (unfused_tensors(model)[f"layers.1.mlp.experts.4.{matrix}.weight"] for matrix in ("up", "down"))
    assert weights.read(up.narrow(0, 41, 50).narrow(1, 3, 4)).shape == (9, 1)
    assert weights.read(down.narrow(1, 0, 40)).shape == (48, 40)
    assert read == [
        (f"1.1.{GATE_UP}", (slice(1, 2), slice(3, 4), slice(41, 50))),  # the second half of rank 1's 2 x 40 columns
        (f"1.0.{DOWN}", (slice(1, 2), slice(0, 40), slice(0, 48))),
    ]


def test_copies_that_nxd_leaves_out_are_those_of_the_first_rank(hf: Path, tmp_path: Path) -> None:
    """NxD's xser saves the data of shared tensors on the first expert-parallel rank only; its converter writes no
    shared tensors at all on the others."""
    expected = load_file(hf / "model.safetensors")
    plain = convert(hf, tmp_path / "plain", "nxd", "tp=2,ep=2")
    saved = convert(hf, tmp_path / "saved", "nxd", "tp=2,ep=2", xser=True)
    for tp in range(2):
        path = rank_path(saved, 1, tp)
        for tid, info in torch.load(f"{path}.info.pt", weights_only=False).items():
            if not info["expert_model_parallel"]:
                (Path(f"{path}.tensors") / f"tensor_{tid}.pt").unlink()
    assert_equal(load_file(convert(saved, tmp_path / "hf-1", "hf") / "model.safetensors"), expected)
    repack_nxd(saved, tmp_path / "repacked", xser=False)
    shutil.copytree(plain, tmp_path / "converter")
    for tp in range(2):
        path, state = rank_path(tmp_path / "converter", 1, tp), load(rank_path(plain, 1, tp))
        torch.save({name: value for name, value in state.items() if is_expert(name)}, path)
        repacked = load(rank_path(tmp_path / "repacked", 1, tp))
        assert list(repacked) == list(state)
        assert_equal(repacked, state)
    assert_equal(load_file(convert(tmp_path / "converter", tmp_path / "hf-2", "hf") / "model.safetensors"), expected)
    expert = next(iter(sorted(Path(f"{rank_path(saved, 1, 1)}.tensors").iterdir())))
    expert.unlink()
    with pytest.raises(UserError, match=rf"ep_rank_01_tp_rank_01.*{expert.name}: cannot be read: No such file"):
        convert(saved, tmp_path / "hf-3", "hf")


# Resuming


def losses(directory: Path, model: dict[str, Any], **checkpoint: Any) -> list[float]:
    recorder = LossRecorder()
    sections = {"checkpoint": {"export_hf": False, **checkpoint}, "log": {"directory": str(directory)}}
    Trainer(configs.tiny_config(model, train={"steps": 2}, **sections), callbacks=[recorder]).run()
    return recorder.losses


def test_a_converted_checkpoint_trains_as_its_source(hf: Path, tmp_path: Path) -> None:
    model = from_hf(hf).model_dump(mode="json")
    nxd = convert(hf, tmp_path / "nxd", "nxd", "tp=4,pp=2,ep=2,kv_multiplier=2")
    native = convert(nxd, tmp_path / "native", "native", "tp=2")
    expected = losses(tmp_path / "hf-run", model, init_from=str(hf))
    assert losses(tmp_path / "nxd-run", model, init_from=str(nxd)) == expected
    assert losses(tmp_path / "native-run", model, resume=str(native), weights_only=True) == expected
    assert len(set(expected)) == 2


# Invalid layouts and checkpoints


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("ep=4", "ep_size=4: does not divide experts=6; nearest: 3"),
        ("ep=12", "ep_size=12: does not divide experts=6; nearest: 6"),
        ("tp=4,kv_multiplier=2", "tp_size=4: does not divide ffn=82; nearest: 2"),
        ("style=megatron", "model_style=megatron: not supported for mixtral; use hf"),
        ("gate_up=false", "gate_up=False: NxD's experts fuse gate and up in one matrix; use gate_up=True"),
    ],
)
def test_invalid_layouts_are_refused_in_one_line(layout: str, message: str, hf: Path) -> None:
    model = from_hf(hf).model_copy(update={"ffn": 82})
    assert isinstance(model, MixtralConfig)
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        check_layout(model, complete_layout(model, parse_layout("nxd", layout)))


def test_missing_files_are_named(hf: Path, tmp_path: Path) -> None:
    nxd = convert(hf, tmp_path / "nxd", "nxd", "tp=2,ep=2")
    rank_path(nxd, 1, 0).unlink()
    with pytest.raises(UserError, match=r"model: 1 of 4 ranks are missing: ep_rank_01_tp_rank_00_pp_rank_00$"):
        open_weights(nxd)
    rank_path(nxd, 1, 1).unlink()  # half of the experts, with names that say so
    with pytest.raises(UserError, match=r"ep_rank_00_tp_rank_00.*gate_up_proj.weight is \[3, 48, 80\], expected \[6,"):
        open_weights(nxd)


@pytest.mark.parametrize("name", [f"{LAYER}mlp.router.linear_router.weight", "model.embed_tokens.weight"])
def test_copies_that_differ_between_ranks_are_refused(name: str, hf: Path, tmp_path: Path) -> None:
    nxd = convert(hf, tmp_path / "nxd", "nxd", "tp=2,ep=2")
    state = load(rank_path(nxd, 1, 1))
    torch.save({**state, name: state[name] + 1}, rank_path(nxd, 1, 1))
    with pytest.raises(UserError, match=rf"nxd/model: the copies in {name} differ between ranks; its files belong to"):
        convert(nxd, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


def test_misfits_are_named_in_one_line(hf: Path, tmp_path: Path) -> None:
    nxd = convert(hf, tmp_path / "nxd", "nxd", "tp=2,ep=2")
    model = from_hf(hf)
    for changes, message in (
        ({"experts": 5}, r"nxd/model: ep_size=2: does not divide experts=5; nearest: 1$"),
        ({"experts": 8}, r"router.weight is \[6, 48\], expected \[8, 48\]$"),
        ({"ffn": 40}, r"gate_up_proj.weight is \[3, 48, 80\], expected \[3, 48, 40\]$"),
    ):
        with pytest.raises(UserError, match=message):
            open_nxd(nxd, model.model_copy(update=changes))
    with pytest.raises(UserError, match=r"ep_size=3 was given, but its files have 2; omit it$"):
        open_nxd(nxd, model, {"ep": 3})
    # The converter in NxD's Mixtral example does not transpose experts, so its files do not fit NxD's model either.
    state = load(rank_path(nxd, 0, 0))
    torch.save({**state, GATE_UP: state[GATE_UP].transpose(1, 2).clone()}, rank_path(nxd, 0, 0))
    with pytest.raises(UserError, match=r"gate_up_proj.weight is \[3, 80, 48\], expected \[3, 48, 80\]$"):
        open_nxd(nxd, model)
