"""Directories of NxD checkpoints are found under all the names they have had; what does not fit is told in one line."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.test_nxd import GQA, Memory, attention, edit, llama, loaded, same, written
from trainyard.checkpoint.formats.nxd.files import find_nxd, open_nxd
from trainyard.checkpoint.formats.nxd.layout import NxdLayout
from trainyard.config.model_schema import GptConfig
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorSlice

# Finding


def done_at(tag: Path, seconds: int) -> None:
    os.utime(tag / "done", (seconds, seconds))


def test_a_checkpoint_is_found_by_any_of_its_directories(tmp_path: Path) -> None:
    weights = Memory(llama())
    tag = written(tmp_path / "checkpoints" / "llama--step=5-consumed_samples=160.0.ckpt", weights, NxdLayout(tp=2))
    (tag / "optim").mkdir()
    for path in (tag, tag / "model", tag.parent):
        found = find_nxd(path)
        assert found
        assert found.root == tag / "model"
        assert list(found.files) == [(0, 0), (0, 1)]
        same(open_nxd(path, weights.model), weights)
    assert find_nxd(tmp_path) is None
    assert find_nxd(tmp_path / "nowhere") is None
    with pytest.raises(UserError, match="no NxD checkpoint here"):
        open_nxd(tmp_path, weights.model)


def test_the_newest_finished_tag_counts(tmp_path: Path) -> None:
    tags = [written(tmp_path / f"step_{step}", Memory(llama())) for step in (10, 9, 11, 12)]
    for tag, seconds in zip(tags, (1000, 2000, 1500, 3000), strict=True):
        done_at(tag, seconds)
    (tags[3] / "done").unlink()
    found = find_nxd(tmp_path)
    assert found
    assert (found.root, found.unfinished_tags) == (tags[1] / "model", ("step_12",))
    with pytest.raises(UserError, match=r"step_12: saving was interrupted \(no done file\); give .*model"):
        find_nxd(tags[3])
    assert find_nxd(tags[3] / "model")
    for tag in tags[:3]:
        shutil.rmtree(tag)
    with pytest.raises(UserError, match=r"no finished checkpoint \(no done file in step_12\)"):
        find_nxd(tmp_path)
    (tags[3] / "checkpoint").unlink()
    assert find_nxd(tags[3])  # the reference's converter writes no marker files


class Foreign:
    """Something of a run's, beside its weights."""


NAMES: dict[str, Callable[[int, int], str]] = {
    "experts": lambda tp, pp: f"dp_rank_00_ep_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt",
    "three digits": lambda tp, pp: f"dp_rank_000_tp_rank_{tp:03d}_pp_rank_{pp:03d}.pt",
    "v1": lambda tp, pp: f"tp_rank_{tp:02d}_pp_rank_{pp:02d}/checkpoint.pt",
    "v1 of each dp rank": lambda tp, pp: f"tp_rank_{tp:02d}_pp_rank_{pp:02d}_dp_rank_00/checkpoint.pt",
    "v1 xser": lambda tp, pp: f"tp_rank_{tp:02d}_pp_rank_{pp:02d}",
    "v1 xser of each dp rank": lambda tp, pp: f"tp_rank_{tp:02d}_pp_rank_{pp:02d}_dp_rank_00",
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("nested", [False, True])
def test_other_names_of_files(kind: str, nested: bool, tmp_path: Path) -> None:
    weights = Memory(llama(**GQA))
    xser = "xser" in kind
    out = written(tmp_path / "out", weights, NxdLayout(tp=2, pp=2), xser=xser)
    for tp in range(2):
        for pp in range(2):
            name = f"dp_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"
            path = tmp_path / "old" / NAMES[kind](tp, pp)
            path.parent.mkdir(parents=True, exist_ok=True)
            if xser:
                shutil.move(out / "model" / name, path)
                shutil.move(out / "model" / f"{name}.tensors", f"{path}.tensors")
            else:
                state = loaded(out, tp, pp)
                torch.save({"model": state, "step": 7, "args": Foreign()} if nested else state, path)
    if "each dp rank" in kind:
        shutil.copytree(tmp_path / "old", tmp_path / "other", dirs_exist_ok=True)
        for path in sorted((tmp_path / "other").iterdir()):
            shutil.move(path, tmp_path / "old" / path.name.replace("dp_rank_00", "dp_rank_01"))
    found = find_nxd(tmp_path / "old")
    assert found
    assert found.xser == xser
    same(open_nxd(tmp_path / "old", weights.model), weights)


def test_inline_tensors_beside_an_empty_tensors_directory(tmp_path: Path) -> None:
    """The reference's converter makes these: its xser keeps tensors of the CPU in the file."""
    weights = Memory(llama())
    out = written(tmp_path / "out", weights)
    (out / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors").mkdir()
    same(open_nxd(out, weights.model), weights)


# Mistakes


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    out = written(tmp_path / "out", Memory(llama()), NxdLayout(tp=2, pp=2))
    (out / "model" / "dp_rank_00_tp_rank_00_pp_rank_01.pt").unlink()
    with pytest.raises(UserError, match=r"model: 1 of 4 ranks are missing: tp_rank_00_pp_rank_01$"):
        open_nxd(out, llama())
    (out / "model" / "dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt").touch()
    with pytest.raises(UserError, match="mixture of experts"):
        open_nxd(out, llama())


def test_what_does_not_fit_is_named_in_one_line(tmp_path: Path) -> None:
    weights = Memory(llama())
    down = "model.layers.1.mlp.down_proj.weight"
    wrongs: dict[str, Callable[[dict[str, Tensor]], Any]] = {
        rf"tp_rank_01.*\.pt: does not fit the model: {down} is missing \(1 missing, 0 unknown\)": lambda state: {
            name: value for name, value in state.items() if name != down
        },
        r"extra.weight has no place in this model \(0 missing, 1 unknown\)": lambda state: {
            **state,
            "extra.weight": torch.ones(1),
        },
        rf"{down} is \[3, 3\], wanted \[16, 12\]": lambda state: {**state, down: torch.ones(3, 3)},
        r"layer 2; the model has 2 layers, it 3": lambda state: {**state, "model.layers.2.x": torch.ones(1)},
        r"holds no tensors by name": lambda state: [1, 2],
    }
    for number, (says, change) in enumerate(wrongs.items()):
        out = written(tmp_path / str(number), weights, NxdLayout(tp=2))
        edit(out, change, tp=1)
        with pytest.raises(UserError, match=says) as error:
            open_nxd(out, weights.model)
        assert "\n" not in str(error.value)


def test_buffers_are_read_past(tmp_path: Path) -> None:
    weights = Memory(llama())
    out = written(tmp_path / "out", weights)
    edit(out, lambda state: {**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    same(open_nxd(out, weights.model), weights)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip", bytes(range(256)) * 8])
def test_files_that_are_no_checkpoint_are_refused(content: bytes, tmp_path: Path) -> None:
    out = written(tmp_path / "out", Memory(llama()))
    path = out / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"dp_rank_00_tp_rank_00_pp_rank_00\.pt") as error:
        open_nxd(out, llama())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": 5}, "layer 4 is missing; the model has 5 layers, it 4"),
        ({"kv_heads": 8}, "qkv_proj.weight_k has 8 rows on each of 4 ranks, not what 8 heads and 8 kv heads"),
        ({"vocab": 60000}, "embed_tokens.weight has 64 rows in all, the model's vocab is 60000"),
        ({"hidden": 64, "head_dim": 4}, r"embed_tokens.weight is \[16, 32\], wanted \[16, 64\]"),
    ],
)
def test_another_model_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    model = llama(**{**GQA, "head_dim": 8})
    out = written(tmp_path / "out", Memory(model), NxdLayout(tp=4, kv_multiplier=2, qkv="qkv_linear"))
    with pytest.raises(UserError, match=says):
        open_nxd(out, model.model_copy(update=changes))
    other = GptConfig(family="gpt", vocab=64, hidden=16, layers=2, heads=4, max_positions=8)
    with pytest.raises(UserError, match=r"model.family=gpt: NxD checkpoints hold Llama models"):
        open_nxd(out, other)
    edit(out, lambda state: {"bert.pooler.weight": torch.ones(2)})
    with pytest.raises(UserError, match=r"holds bert.pooler.weight, not a Llama model of NxD"):
        open_nxd(out, model)


def test_hints_must_agree_with_the_files(tmp_path: Path) -> None:
    weights = Memory(llama(**GQA))
    layout = NxdLayout(tp=4, pp=2, kv_multiplier=2, qkv="qkv_linear")
    out = written(tmp_path / "out", weights, layout)
    agreeing = {"tp": 4, "pp": 2, "vpp": 1, "kv_multiplier": 2, "qkv": "qkv_linear", "kv_order": "trn1"}
    same(open_nxd(out, weights.model, agreeing), weights)
    for hint, says in (
        ({"tp": 8}, "tp_size=8 was given, but its files have 4"),
        ({"qkv": "fused"}, "qkv=fused was given, but its files have qkv_linear"),
        ({"kv_multiplier": 4}, "kv_size_multiplier=4 was given, but its files have 2"),
        ({"kv_order": "trn2"}, "hw_backend=trn2 was given, but its kv heads lie as trn1 has them"),
        ({"style": "megatron"}, "model_style=megatron was given, but its files have hf"),
    ):
        with pytest.raises(UserError, match=says):
            open_nxd(out, weights.model, hint)


@pytest.mark.parametrize("drift", [0, 1])
def test_where_copies_do_not_tell_the_order_a_hint_must(drift: int, tmp_path: Path) -> None:
    """All kv heads alike, or none like another: the query heads' order could be either."""
    weights = Memory(llama(**GQA))
    for layer in range(4):
        for letter in "kv":
            weights.layer(layer, f"attention.{letter}")[:] = 1
    layout = NxdLayout(tp=4, kv_multiplier=2, qkv="qkv_linear", kv_order="trn2")
    out = written(tmp_path / "out", weights, layout)
    key = "model.layers.0.self_attn.qkv_proj.weight_k"
    for rank in range(4):
        value = loaded(out, rank)[key] + rank * drift
        edit(out, lambda state, value=value: {**state, key: value}, tp=rank)
    with pytest.raises(UserError, match="do not tell trn1's order from trn2's; give --hw_backend"):
        open_nxd(out, weights.model)
    found = open_nxd(out, weights.model, {"kv_order": "trn2"})
    assert torch.equal(found.read(TensorSlice.full("layers.0.attention.q.weight", (32, 32))), attention(weights)[0])
    if drift:
        with pytest.raises(UserError, match=r"weight_k is not the same wherever it is held; its ranks have drifted"):
            open_nxd(out, weights.model, {"kv_order": "trn2"}, verify_copies=True)
