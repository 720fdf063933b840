"""NxD checkpoints: each rank's file holds what NxD's model expects, and every layout of NxD can be read."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.examples import examples
from trainyard.checkpoint.weights import WeightSource, unfused_tensors
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.builtin.llama import LlamaConfig
from trainyard.families.decoder import DecoderConfig
from trainyard.formats.nxd import layout as nxd_layout
from trainyard.formats.nxd.layout import NxdLayout, NxdRank, require_nxd_model
from trainyard.formats.nxd.rank_files import NxdWeights, open_nxd, repack_nxd, write_nxd
from trainyard.formats.tensor_map import StoredTensor, find_mismatched_copy

GQA: dict[str, Any] = {"hidden": 32, "heads": 8, "kv_heads": 2, "layers": 4}
B70 = {"vocab": 128256, "hidden": 8192, "heads": 64, "kv_heads": 8, "layers": 80, "ffn": 28672}


def llama(**changes: Any) -> LlamaConfig:
    base = {"vocab": 64, "hidden": 16, "layers": 2, "heads": 4, "ffn": 24, "max_positions": 32}
    return LlamaConfig(family="llama", **{**base, **changes})


class RandomWeights:
    """Random weights in memory, every one different."""

    def __init__(self, model: DecoderConfig, dtype: torch.dtype = torch.float32) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(1)
        self.tensors = {
            name: torch.randn(tensor.sizes, generator=generator).to(dtype)
            for name, tensor in unfused_tensors(model).items()
        }

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, wanted: TensorSlice) -> Tensor:
        return self.tensors[wanted.name][wanted.to_index()]

    def layer(self, layer: int, name: str) -> Tensor:
        return self.tensors[f"layers.{layer}.{name}.weight"]


def assert_same(found: WeightSource, expected: RandomWeights) -> None:
    for name, value in expected.tensors.items():
        read = found.read(TensorSlice.full(name, tuple(value.shape)))
        assert read.dtype == value.dtype == found.dtype(name)
        assert torch.equal(read, value), name


def load_rank(directory: Path, tp: int = 0, pp: int = 0) -> dict[str, Tensor]:
    """A rank's file as NxD loads it."""
    path = directory / "model" / f"dp_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"
    state: dict[str, Tensor] = torch.load(path, weights_only=True)
    return state


def write(path: Path, weights: RandomWeights, layout: NxdLayout | None = None, **options: Any) -> Path:
    write_nxd(path, weights, layout or NxdLayout(), **options)
    return path


def edit_rank(out: Path, change: Callable[[dict[str, Tensor]], Any], tp: int = 0, pp: int = 0) -> None:
    """Rewrite a rank's file."""
    torch.save(change(load_rank(out, tp, pp)), out / "model" / f"dp_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt")


def heads_of(tensors: tuple[StoredTensor, ...], letter: str, size: int) -> list[int]:
    """The heads of layer 0's q, k, v or output matrix in a rank's file, in order."""
    name, dim = f"layers.0.attention.{letter}.weight", int(letter == "output")
    rows = [piece.to_index()[dim] for stored in tensors for piece in stored.slices if piece.name == name]
    return [head for row in rows for head in range(row.start // size, row.stop // size)]


# The tensors of each rank


def test_70b_on_trn1_replicates_kv_heads_as_a_block_and_permutes_the_queries() -> None:
    ranks = nxd_layout.rank_tensors(llama(**B70), NxdLayout(tp=32, pp=8, kv_multiplier=4, qkv="qkv_linear"))
    assert [heads_of(ranks[NxdRank(0, 0, rank)], "q", 128) for rank in (0, 1, 8)] == [[0, 1], [8, 9], [2, 3]]
    assert [heads_of(ranks[NxdRank(0, 0, rank)], "k", 128) for rank in range(32)] == [[rank % 8] for rank in range(32)]


def test_70b_on_trn2_replicates_kv_heads_on_adjacent_ranks() -> None:
    ranks = nxd_layout.rank_tensors(llama(**B70), NxdLayout(tp=32, kv_multiplier=4, qkv="fused", kv_order="trn2"))
    assert [heads_of(ranks[NxdRank(0, 0, rank)], "q", 128) for rank in range(32)] == [
        [2 * r, 2 * r + 1] for r in range(32)
    ]
    assert [heads_of(ranks[NxdRank(0, 0, rank)], "v", 128) for rank in range(32)] == [[rank // 4] for rank in range(32)]


def matching(model: LlamaConfig, queries: list[int], keys: list[int]) -> bool:
    """True if each local kv head belongs to its local query heads, of which NxD assigns it an equal range."""
    return [query // (model.heads // model.num_kv_heads) for query in queries] == [
        key for key in keys for _ in range(len(queries) // len(keys))
    ]


@pytest.mark.parametrize("order", ["trn1", "trn2"])
def test_queries_are_on_the_rank_of_their_keys_at_70b(order: nxd_layout.KvOrder) -> None:
    """NxD's reference converter for trn2 replicates keys as on trn1: only 4 of its 32 ranks match."""
    model = llama(**B70)
    layout = NxdLayout(tp=32, kv_multiplier=4, qkv="qkv_linear", kv_order=order)
    ranks = nxd_layout.rank_tensors(model, layout)
    for tensors in ranks.values():
        queries, keys, values = (heads_of(tensors, letter, 128) for letter in "qkv")
        assert matching(model, queries, keys)
        assert keys == values
        assert heads_of(tensors, "output", 128) == queries
    assert sorted(query for tensors in ranks.values() for query in heads_of(tensors, "q", 128)) == list(range(64))
    reference = [matching(model, [2 * rank, 2 * rank + 1], [rank % 8]) for rank in range(32)]
    assert sum(reference) == 4


@st.composite
def cases(draw: st.DrawFn) -> tuple[LlamaConfig, NxdLayout]:
    kv, group = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    style = draw(st.sampled_from(["hf", "hf", "megatron"]))
    kinds = ["separate", "coalesced", "qkv_linear", "fused"] if style == "hf" else ["coalesced", "qkv_linear"]
    pp, vpp = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    layers = draw(st.integers(pp * vpp, pp * vpp + 3))
    tied, vocab = draw(st.booleans()), draw(st.sampled_from([64, 61, 33]))
    model = llama(heads=kv * group, kv_heads=kv, head_dim=4, layers=layers, tie_embeddings=tied, vocab=vocab)
    layout = NxdLayout(
        tp=draw(st.sampled_from([1, 2, 4, 8])),
        pp=pp,
        vpp=vpp if pp > 1 else 1,
        qkv=draw(st.sampled_from(kinds)),
        gate_up=style == "megatron" or draw(st.booleans()),
        kv_order=draw(st.sampled_from(["trn1", "trn2"])),
        style=style,
        by_head=draw(st.booleans()),
    )
    if draw(st.booleans()) and pp > 1:
        cuts = st.lists(st.integers(0, layers - 2), min_size=pp * vpp - 1, max_size=pp * vpp - 1, unique=True)
        layout = replace(layout, pipeline_cuts=tuple(sorted(draw(cuts))))
    assume(model.heads % layout.tp == 0)
    valid = nxd_layout.valid_kv_multipliers(model, layout)
    assume(valid)
    return model, replace(layout, kv_multiplier=draw(st.sampled_from(valid)))


@examples(200)
@given(cases())
def test_every_tensor_is_covered_and_queries_stay_with_keys(case: tuple[LlamaConfig, NxdLayout]) -> None:
    model, layout = case
    ranks = nxd_layout.rank_tensors(model, layout)
    covered: dict[str, set[int]] = {}
    dims: dict[str, int] = {}
    for stored in (stored for tensors in ranks.values() for stored in tensors):
        for piece in stored.slices:
            start = piece.offsets[stored.dim]
            covered.setdefault(piece.name, set()).update(range(start, start + piece.sizes[stored.dim]))
            assert dims.setdefault(piece.name, stored.dim) == stored.dim
    assert covered == {name: set(range(tensor.sizes[dims[name]])) for name, tensor in unfused_tensors(model).items()}
    first_stage = [tensors for (pp, _, _), tensors in ranks.items() if pp == 0]
    assert all(matching(model, heads_of(tensors, "q", 4), heads_of(tensors, "k", 4)) for tensors in first_stage)


def test_remaining_layers_go_to_the_last_stages() -> None:
    model = llama(layers=10)
    assert [nxd_layout.pp_rank_layers(model, NxdLayout(pp=4), rank) for rank in range(4)] == [
        [0, 1],
        [2, 3],
        [4, 5, 6],
        [7, 8, 9],
    ]
    virtual = NxdLayout(pp=2, vpp=2)
    assert [nxd_layout.pp_rank_layers(model, virtual, rank) for rank in range(2)] == [[0, 1, 4, 5, 6], [2, 3, 7, 8, 9]]
    cut = NxdLayout(pp=2, vpp=2, pipeline_cuts=(0, 5, 6))
    assert [nxd_layout.pp_rank_layers(model, cut, rank) for rank in range(2)] == [[0, 6], [1, 2, 3, 4, 5, 7, 8, 9]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 3}, "tp_size=3: does not divide heads=64; nearest: 2"),
        ({"tp": 64, "qkv": "qkv_linear"}, "kv_size_multiplier=1: .* valid: 8"),
        ({"tp": 32}, "kv_size_multiplier=1: .* nearest: qkv=qkv_linear with kv_size_multiplier=4"),
        ({"tp": 32, "style": "megatron", "qkv": "qkv_linear"}, "nearest: tp_size=8"),
        ({"tp": 8, "qkv": "fused", "kv_multiplier": 3}, "kv_size_multiplier=3: .* valid: 1, 2, 4, 8"),
        ({"tp": 8, "qkv": "fused", "kv_multiplier": 2, "kv_order": "trn2"}, "trn2.; valid: 1"),
        ({"kv_multiplier": 2}, "kv_size_multiplier=2: .* valid: 1"),
        ({"kv_multiplier": 0}, "kv_size_multiplier=0: must be 1 or more"),
        ({"pp": 41, "vpp": 2}, "82 stages for 80 layers; at most 80"),
        (
            {"pp": 2, "pipeline_cuts": (3, 9)},
            "pipeline_cuts=3, 9: must be 1 increasing layer numbers up to 78.* for even stages: 39",
        ),
        ({"pp": 3, "pipeline_cuts": (9, 3)}, "pipeline_cuts=9, 3: must be 2 increasing"),
        ({"style": "megatron"}, "qkv=separate: not available in megatron style; use coalesced or qkv_linear"),
        ({"style": "megatron", "qkv": "coalesced", "gate_up": False}, "use gate_up=True"),
        (
            {"tp": 8, "vocab": 128260},
            "vocab=128260: must be at least 128256 and a multiple of tp_size=8; smallest: 128256",
        ),
    ],
)
def test_invalid_layouts_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        nxd_layout.rank_tensors(llama(**B70), NxdLayout(**changes))
    assert "\n" not in str(error.value)


# Files, compared with tensors sharded by hand


def attention(weights: RandomWeights, layer: int = 0) -> tuple[Tensor, ...]:
    return tuple(weights.layer(layer, f"attention.{name}") for name in ("q", "k", "v", "output"))


def by_heads(matrix: Tensor, order: list[int], size: int, dim: int = 0) -> Tensor:
    return torch.cat([matrix.split(size, dim)[head] for head in order], dim)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("order", "queries"),
    # Two kv heads, two replicas each; query heads 0 to 3 attend to the first. On trn1, rank 1 has the second kv head.
    [("trn1", [0, 1, 4, 5, 2, 3, 6, 7]), ("trn2", [0, 1, 2, 3, 4, 5, 6, 7])],
)
def test_files_of_replicated_heads(order: nxd_layout.KvOrder, queries: list[int], fused: bool, tmp_path: Path) -> None:
    weights = RandomWeights(llama(**GQA))
    layout = NxdLayout(tp=4, kv_multiplier=2, qkv="fused" if fused else "qkv_linear", kv_order=order)
    write(tmp_path / "out", weights, layout)
    q, k, v, o = attention(weights)
    if order == "trn1":
        keys, values = (x.repeat(2, 1).chunk(4) for x in (k, v))
    else:
        keys, values = (x.view(2, 4, 32).repeat_interleave(2, 0).reshape(16, 32).chunk(4) for x in (k, v))
    qs, os_ = by_heads(q, queries, 4).chunk(4), by_heads(o, queries, 4, 1).chunk(4, 1)
    for rank in range(4):
        state = load_rank(tmp_path / "out", rank)
        at = "model.layers.0.self_attn."
        assert torch.equal(state[f"{at}o_proj.weight"], os_[rank])
        if fused:
            assert torch.equal(state[f"{at}qkv_proj.weight_qkv"], torch.cat([qs[rank], keys[rank], values[rank]]))
        else:
            for letter, wanted in zip("qkv", (qs, keys, values), strict=True):
                assert torch.equal(state[f"{at}qkv_proj.weight_{letter}"], wanted[rank])


def test_files_of_a_pipeline(tmp_path: Path) -> None:
    """The other tensors: on which rank, under which name, in the model's order."""
    weights = RandomWeights(llama(**GQA))
    write(tmp_path / "out", weights, NxdLayout(tp=2, pp=2))
    first, last = load_rank(tmp_path / "out", 1, 0), load_rank(tmp_path / "out", 1, 1)
    layer = [
        *(f"self_attn.{x}_proj.weight" for x in "qkvo"),
        "mlp.gate_up_proj.weight",
        "mlp.down_proj.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]
    assert list(first) == ["model.embed_tokens.weight", *(f"model.layers.{i}.{name}" for i in (0, 1) for name in layer)]
    assert list(last) == [
        *(f"model.layers.{i}.{x}" for i in (2, 3) for x in layer),
        "model.norm.weight",
        "lm_head.weight",
    ]
    halves = {name: value.chunk(2)[1] for name, value in weights.tensors.items()}
    assert torch.equal(first["model.embed_tokens.weight"], halves["embedding.weight"])
    assert torch.equal(last["lm_head.weight"], halves["output.weight"])
    assert torch.equal(last["model.norm.weight"], weights.tensors["norm.weight"])
    assert torch.equal(last["model.layers.3.self_attn.k_proj.weight"], halves["layers.3.attention.k.weight"])
    gate_up = torch.cat([halves["layers.1.mlp.gate.weight"], halves["layers.1.mlp.up.weight"]])
    assert torch.equal(first["model.layers.1.mlp.gate_up_proj.weight"], gate_up)
    down = weights.layer(1, "mlp.down").chunk(2, 1)[1]
    assert torch.equal(first["model.layers.1.mlp.down_proj.weight"], down)
    assert torch.equal(first["model.layers.1.input_layernorm.weight"], weights.layer(1, "attention_norm"))
    assert (tmp_path / "out" / "checkpoint").read_text() == (tmp_path / "out" / "done").read_text() == "1"


def test_files_of_coalesced_heads(tmp_path: Path) -> None:
    weights = RandomWeights(llama())
    write(tmp_path / "out", weights, NxdLayout(tp=2, qkv="coalesced", gate_up=False))
    state = load_rank(tmp_path / "out", 1)
    wanted = torch.cat([x.chunk(2)[1] for x in attention(weights)[:3]])
    assert torch.equal(state["model.layers.0.self_attn.qkv_proj.weight"], wanted)
    assert torch.equal(state["model.layers.0.mlp.up_proj.weight"], weights.layer(0, "mlp.up").chunk(2)[1])


@pytest.mark.parametrize("by_head", [True, False])
def test_files_of_megatron_style(by_head: bool, tmp_path: Path) -> None:
    """NxDT's Megatron model splits its fused outputs head by head; NxD's reference converter writes blocks."""
    weights = RandomWeights(llama(**GQA))
    write(tmp_path / "out", weights, NxdLayout(tp=1, qkv="qkv_linear", style="megatron", by_head=by_head))
    state = load_rank(tmp_path / "out")
    q, k, v, o = attention(weights)
    at = "language_model.encoder.layers.0."
    pairs = [k[:4], v[:4], k[4:], v[4:]] if by_head else [k, v]
    assert torch.equal(state[f"{at}self_attention.key_value.weight"], torch.cat(pairs))
    assert torch.equal(state[f"{at}self_attention.query.weight"], q)
    assert torch.equal(state[f"{at}self_attention.dense.weight"], o)
    gate_up = torch.cat([weights.layer(0, "mlp.gate"), weights.layer(0, "mlp.up")])
    assert torch.equal(state[f"{at}mlp.dense_h_to_4h.weight"], gate_up)
    assert torch.equal(state[f"{at}mlp.dense_4h_to_h.weight"], weights.layer(0, "mlp.down"))
    assert torch.equal(state[f"{at}post_attention_layernorm.weight"], weights.layer(0, "mlp_norm"))
    for name, unfused in (
        ("embedding.word_embeddings", "embedding"),
        ("encoder.final_layernorm", "norm"),
        ("output_layer", "output"),
    ):
        assert torch.equal(state[f"language_model.{name}.weight"], weights.tensors[f"{unfused}.weight"])
    multi_head = RandomWeights(llama())
    write(tmp_path / "mha", multi_head, NxdLayout(tp=2, qkv="coalesced", style="megatron", by_head=by_head))
    q, k, v, _ = (x[8:].split(4) for x in attention(multi_head))
    rows = [q[0], k[0], v[0], q[1], k[1], v[1]] if by_head else [*q, *k, *v]
    state = load_rank(tmp_path / "mha", 1)
    assert torch.equal(state[f"{at}self_attention.query_key_value.weight"], torch.cat(rows))


def test_a_vocabulary_that_does_not_divide_is_padded_with_zeros(tmp_path: Path) -> None:
    weights = RandomWeights(llama(vocab=5))
    write(tmp_path / "out", weights, NxdLayout(tp=4))
    ranks = [load_rank(tmp_path / "out", rank)["lm_head.weight"] for rank in range(4)]
    assert torch.equal(torch.cat(ranks), torch.cat([weights.tensors["output.weight"], torch.zeros(3, 16)]))
    assert_same(open_nxd(tmp_path / "out", weights.model), weights)
    write(tmp_path / "more", weights, NxdLayout(tp=2, vocab=128))
    found = open_nxd(tmp_path / "more", weights.model)
    assert found.layout.vocab == 128
    assert_same(found, weights)


def test_a_tied_head_is_written_twice_and_read_from_one_or_both_copies(tmp_path: Path) -> None:
    weights = RandomWeights(llama(tie_embeddings=True))
    out = write(tmp_path / "out", weights, NxdLayout(pp=2))
    assert torch.equal(load_rank(out, 0, 1)["lm_head.weight"], weights.tensors["embedding.weight"])
    assert_same(open_nxd(out, weights.model), weights)
    edit_rank(out, lambda state: {**state, "lm_head.weight": state["lm_head.weight"] + 1}, pp=1)
    with pytest.raises(UserError, match=r"the copies of lm_head.weight differ; model.tie_embeddings=true does not fit"):
        open_nxd(out, weights.model)
    edit_rank(out, lambda state: {name: value for name, value in state.items() if name != "lm_head.weight"}, pp=1)
    assert_same(open_nxd(out, weights.model), weights)
    with pytest.raises(UserError, match=r"pp_rank_01.pt: .* lm_head.weight is missing \(1 missing, 0 unknown\)"):
        open_nxd(out, llama())


# Round trips


def mismatched_copy(weights: NxdWeights) -> str | None:
    """The name of the first tensor that differs from its replica on another rank."""
    ranks = nxd_layout.rank_tensors(require_nxd_model(weights.model), weights.layout)
    return find_mismatched_copy(
        (stored, weights.rank_tensors[rank][stored.name]) for rank, tensors in ranks.items() for stored in tensors
    )


@examples(40)
@given(case=cases(), xser=st.booleans(), bf16=st.booleans())
def test_round_trips_bit_for_bit(case: tuple[LlamaConfig, NxdLayout], xser: bool, bf16: bool) -> None:
    model, layout = case
    weights = RandomWeights(model, torch.bfloat16 if bf16 else torch.float32)
    with TemporaryDirectory() as folder:
        out = write(Path(folder) / "out", weights, layout, xser=xser)
        found = open_nxd(out, model, {"by_head": layout.by_head})
        assert mismatched_copy(found) is None
        assert_same(found, weights)
        inferred = replace(found.layout, kv_order=layout.kv_order)
        assert inferred == replace(layout, pipeline_cuts=nxd_layout.stage_cuts(model, layout))
        if layout.kv_multiplier > 1 and model.num_kv_heads > 1:
            assert found.layout.kv_order == layout.kv_order


def test_fused_matrices_of_unequal_sizes_are_split(tmp_path: Path) -> None:
    """With 70B's ratios, q:k:v are 2:1:1 on a rank; NxD's reference converter splits it in three equal parts."""
    weights = RandomWeights(llama(hidden=16, heads=64, kv_heads=8, head_dim=2, ffn=32, layers=1))
    layout = NxdLayout(tp=32, kv_multiplier=4, qkv="fused")
    out = write(tmp_path / "out", weights, layout)
    assert load_rank(out)["model.layers.0.self_attn.qkv_proj.weight_qkv"].shape == (8, 16)
    found = open_nxd(out, weights.model)
    assert found.layout == layout
    assert_same(found, weights)


def test_repacking_to_xser_and_back_needs_no_model(tmp_path: Path) -> None:
    weights = RandomWeights(llama(), torch.bfloat16)
    plain = write(tmp_path / "plain", weights, NxdLayout(tp=2, pp=2))
    repack_nxd(plain, tmp_path / "xser", xser=True)
    tensors = tmp_path / "xser" / "model" / "dp_rank_00_tp_rank_01_pp_rank_01.pt.tensors"
    assert torch.equal(
        torch.load(tensors / "tensor_0.pt", weights_only=True), next(iter(load_rank(plain, 1, 1).values()))
    )
    assert_same(open_nxd(tmp_path / "xser", weights.model), weights)
    repack_nxd(tmp_path / "xser" / "model", tmp_path / "again", xser=False)
    for pp in range(2):
        for tp in range(2):
            before, after = load_rank(plain, tp, pp), load_rank(tmp_path / "again", tp, pp)
            assert list(before) == list(after)
            assert all(torch.equal(before[name], after[name]) for name in before)


def test_xser_is_read_without_its_info_file(tmp_path: Path) -> None:
    """Old versions of NxD wrote none, and newer ones fail without it."""
    weights = RandomWeights(llama())
    out = write(tmp_path / "out", weights, NxdLayout(tp=2), xser=True)
    infos = list((out / "model").glob("*.info.pt"))
    assert len(infos) == 2
    for info in infos:
        info.unlink()
    assert_same(open_nxd(out, weights.model), weights)


def test_any_pipeline_cuts_are_read(tmp_path: Path) -> None:
    weights = RandomWeights(llama(layers=6))
    out = write(tmp_path / "out", weights, NxdLayout(pp=3, pipeline_cuts=(0, 3)))
    found = open_nxd(out, weights.model)
    assert (found.layout.pp, found.layout.vpp, found.layout.pipeline_cuts) == (3, 1, (0, 3))
    assert_same(found, weights)
    assert_same(open_nxd(out, weights.model, {"pipeline_cuts": (0, 3), "pp": 3}), weights)


def test_weights_are_written_in_the_requested_dtype(tmp_path: Path) -> None:
    weights = RandomWeights(llama())
    sizes: list[int] = []
    out = write(tmp_path / "out", weights, NxdLayout(tp=2), dtype=torch.bfloat16, progress=sizes.append)
    states = [load_rank(out, rank) for rank in range(2)]
    assert {value.dtype for state in states for value in state.values()} == {torch.bfloat16}
    assert sum(sizes) == sum(value.nbytes for state in states for value in state.values())
    halved = RandomWeights(llama())
    halved.tensors = {name: value.bfloat16() for name, value in halved.tensors.items()}
    assert_same(open_nxd(out, weights.model), halved)


def test_conversion_between_layouts(tmp_path: Path) -> None:
    """An opened checkpoint is a source for writing, with other ranks and another qkv kind."""
    weights = RandomWeights(llama(**GQA), torch.bfloat16)
    out = write(tmp_path / "a", weights, NxdLayout(tp=8, kv_multiplier=4, qkv="fused", kv_order="trn2"), xser=True)
    write_nxd(tmp_path / "b", open_nxd(out, weights.model), NxdLayout(tp=2, pp=2, qkv="coalesced", style="megatron"))
    assert_same(open_nxd(tmp_path / "b", weights.model), weights)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    weights = RandomWeights(llama())
    del weights.tensors["norm.weight"]
    for xser in (False, True):
        with pytest.raises(KeyError):
            write_nxd(tmp_path / "out", weights, NxdLayout(tp=2), xser=xser)
        assert list(tmp_path.iterdir()) == []


def test_existing_directories_are_not_overwritten(tmp_path: Path) -> None:
    weights = RandomWeights(llama())
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", weights)
    with pytest.raises(UserError, match="already exists and is not empty"):
        write(tmp_path / "empty", weights)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be created"):
        write(tmp_path / "file" / "out", weights)
    assert_same(open_nxd(tmp_path / "empty", weights.model), weights)
