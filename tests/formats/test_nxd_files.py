"""NxD checkpoints are found under all file names of all versions, and misfits are refused in one line."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.formats.test_nxd import (
    GQA,
    RandomWeights,
    assert_same,
    attention,
    edit_rank,
    llama,
    load_rank,
    mismatched_copy,
    write,
)
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.builtin.gpt import GptConfig
from trainyard.formats.nxd.layout import NxdLayout
from trainyard.formats.nxd.rank_files import find_nxd, open_nxd

# Finding files


def done_at(tag: Path, seconds: int) -> None:
    os.utime(tag / "done", (seconds, seconds))


def test_a_checkpoint_is_found_by_any_of_its_directories(tmp_path: Path) -> None:
    weights = RandomWeights(llama())
    tag = write(tmp_path / "checkpoints" / "llama--step=5-consumed_samples=160.0.ckpt", weights, NxdLayout(tp=2))
    (tag / "optim").mkdir()
    for path in (tag, tag / "model", tag.parent):
        found = find_nxd(path)
        assert found
        assert found.root == tag / "model"
        assert list(found.files) == [(0, 0, 0), (0, 0, 1)]
        assert_same(open_nxd(path, weights.model), weights)
    assert find_nxd(tmp_path) is None
    assert find_nxd(tmp_path / "nowhere") is None
    with pytest.raises(UserError, match="no NxD checkpoint"):
        open_nxd(tmp_path, weights.model)


def test_the_latest_finished_tag_is_used(tmp_path: Path) -> None:
    tags = [write(tmp_path / f"step_{step}", RandomWeights(llama())) for step in (10, 9, 11, 12)]
    for tag, seconds in zip(tags, (1000, 2000, 1500, 3000), strict=True):
        done_at(tag, seconds)
    (tags[3] / "done").unlink()
    found = find_nxd(tmp_path)
    assert found
    assert (found.root, found.unfinished_tags) == (tags[1] / "model", ("step_12",))
    with pytest.raises(UserError, match=r"step_12: saving was interrupted \(no done file\); pass .*model"):
        find_nxd(tags[3])
    assert find_nxd(tags[3] / "model")
    for tag in tags[:3]:
        shutil.rmtree(tag)
    with pytest.raises(UserError, match=r"no finished checkpoint \(no done file in step_12\)"):
        find_nxd(tmp_path)
    (tags[3] / "checkpoint").unlink()
    assert find_nxd(tags[3])  # NxD's reference converter writes no marker files


class Foreign:
    """An object of a run that is saved with its weights."""


NAMES: dict[str, Callable[[int, int], str]] = {
    "experts": lambda tp, pp: f"dp_rank_00_ep_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt",
    "three digits": lambda tp, pp: f"dp_rank_000_tp_rank_{tp:03d}_pp_rank_{pp:03d}.pt",
    "v1": lambda tp, pp: f"tp_rank_{tp:02d}_pp_rank_{pp:02d}/checkpoint.pt",
    "v1 per dp rank": lambda tp, pp: f"tp_rank_{tp:02d}_pp_rank_{pp:02d}_dp_rank_00/checkpoint.pt",
    "v1 xser": lambda tp, pp: f"tp_rank_{tp:02d}_pp_rank_{pp:02d}",
    "v1 xser per dp rank": lambda tp, pp: f"tp_rank_{tp:02d}_pp_rank_{pp:02d}_dp_rank_00",
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("nested", [False, True])
def test_file_names_of_other_versions(kind: str, nested: bool, tmp_path: Path) -> None:
    weights = RandomWeights(llama(**GQA))
    xser = "xser" in kind
    out = write(tmp_path / "out", weights, NxdLayout(tp=2, pp=2), xser=xser)
    for tp in range(2):
        for pp in range(2):
            name = f"dp_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"
            path = tmp_path / "old" / NAMES[kind](tp, pp)
            path.parent.mkdir(parents=True, exist_ok=True)
            if xser:
                shutil.move(out / "model" / name, path)
                shutil.move(out / "model" / f"{name}.tensors", f"{path}.tensors")
            else:
                state = load_rank(out, tp, pp)
                torch.save({"model": state, "step": 7, "args": Foreign()} if nested else state, path)
    if "per dp rank" in kind:
        shutil.copytree(tmp_path / "old", tmp_path / "other", dirs_exist_ok=True)
        for path in sorted((tmp_path / "other").iterdir()):
            shutil.move(path, tmp_path / "old" / path.name.replace("dp_rank_00", "dp_rank_01"))
    assert_same(open_nxd(tmp_path / "old", weights.model), weights)


def test_inline_tensors_next_to_an_empty_tensors_directory(tmp_path: Path) -> None:
    """NxD's reference converter writes these: its xser keeps CPU tensors in the file."""
    weights = RandomWeights(llama())
    out = write(tmp_path / "out", weights)
    (out / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors").mkdir()
    assert_same(open_nxd(out, weights.model), weights)


# Invalid checkpoints


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    out = write(tmp_path / "out", RandomWeights(llama()), NxdLayout(tp=2, pp=2))
    (out / "model" / "dp_rank_00_tp_rank_00_pp_rank_01.pt").unlink()
    with pytest.raises(UserError, match=r"model: 1 of 4 ranks are missing: tp_rank_00_pp_rank_01$"):
        open_nxd(out, llama())


def test_files_of_expert_parallel_ranks_need_a_model_with_experts(tmp_path: Path) -> None:
    out = write(tmp_path / "out", RandomWeights(llama()))
    first = "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    shutil.copy(out / "model" / first, out / "model" / first.replace("_tp", "_ep_rank_01_tp"))
    with pytest.raises(UserError, match=r"model: ep_size=2: a llama model has no experts; nearest: 1$"):
        open_nxd(out, llama())


def test_misfits_are_named_in_one_line(tmp_path: Path) -> None:
    weights = RandomWeights(llama())
    down = "model.layers.1.mlp.down_proj.weight"
    misfits: dict[str, Callable[[dict[str, Tensor]], Any]] = {
        rf"tp_rank_01.*\.pt: does not fit the model: {down} is missing \(1 missing, 0 unknown\)": lambda state: {
            name: value for name, value in state.items() if name != down
        },
        r"extra.weight is not a tensor of this model \(0 missing, 1 unknown\)": lambda state: {
            **state,
            "extra.weight": torch.ones(1),
        },
        rf"{down} is \[3, 3\], expected \[16, 12\]": lambda state: {**state, down: torch.ones(3, 3)},
        r"layer 2; the model has 2 layers, the checkpoint 3": lambda state: {
            **state,
            "model.layers.2.x": torch.ones(1),
        },
        r"holds no tensors by name": lambda state: [1, 2],
    }
    for i, (message, change) in enumerate(misfits.items()):
        out = write(tmp_path / str(i), weights, NxdLayout(tp=2))
        edit_rank(out, change, tp=1)
        with pytest.raises(UserError, match=message) as error:
            open_nxd(out, weights.model)
        assert "\n" not in str(error.value)


def test_buffers_are_ignored(tmp_path: Path) -> None:
    weights = RandomWeights(llama())
    out = write(tmp_path / "out", weights)
    edit_rank(out, lambda state: {**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    assert_same(open_nxd(out, weights.model), weights)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip", bytes(range(256)) * 8])
def test_invalid_files_are_refused(content: bytes, tmp_path: Path) -> None:
    out = write(tmp_path / "out", RandomWeights(llama()))
    path = out / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"dp_rank_00_tp_rank_00_pp_rank_00\.pt") as error:
        open_nxd(out, llama())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 5}, "layer 4 is missing; the model has 5 layers, the checkpoint 4"),
        (
            {"kv_heads": 8},
            "qkv_proj.weight_k has 8 rows on each of 4 ranks; that fits no multiplier for 8 heads and 8 kv heads",
        ),
        ({"vocab": 60000}, "embed_tokens.weight has 64 rows on all ranks, the model has vocab=60000"),
        ({"hidden": 64, "head_dim": 4}, r"embed_tokens.weight is \[16, 32\], expected \[16, 64\]"),
    ],
)
def test_another_model_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = llama(**{**GQA, "head_dim": 8})
    out = write(tmp_path / "out", RandomWeights(model), NxdLayout(tp=4, kv_multiplier=2, qkv="qkv_linear"))
    with pytest.raises(UserError, match=message):
        open_nxd(out, model.model_copy(update=changes))
    other = GptConfig(family="gpt", vocab=64, hidden=16, layers=2, heads=4, max_positions=8)
    with pytest.raises(UserError, match=r"model.family=gpt: NxD checkpoints hold models of llama, mistral, mixtral"):
        open_nxd(out, other)
    edit_rank(out, lambda state: {"bert.pooler.weight": torch.ones(2)})
    with pytest.raises(UserError, match=r"holds bert.pooler.weight, not an NxD Llama model"):
        open_nxd(out, model)


def test_hints_must_agree_with_the_files(tmp_path: Path) -> None:
    weights = RandomWeights(llama(**GQA))
    layout = NxdLayout(tp=4, pp=2, kv_multiplier=2, qkv="qkv_linear")
    out = write(tmp_path / "out", weights, layout)
    agreeing = {"tp": 4, "pp": 2, "vpp": 1, "kv_multiplier": 2, "qkv": "qkv_linear", "kv_order": "trn1"}
    assert_same(open_nxd(out, weights.model, agreeing), weights)
    for hint, message in (
        ({"tp": 8}, "tp_size=8 was given, but its files have 4"),
        ({"qkv": "fused"}, "qkv=fused was given, but its files have qkv_linear"),
        ({"kv_multiplier": 4}, "kv_size_multiplier=4 was given, but its files have 2"),
        ({"style": "megatron"}, "model_style=megatron was given, but its files have hf"),
    ):
        with pytest.raises(UserError, match=message):
            open_nxd(out, weights.model, hint)


def test_a_hint_is_needed_if_replicas_do_not_show_the_order(tmp_path: Path) -> None:
    """If all kv heads are equal, the query heads could be in either order."""
    weights = RandomWeights(llama(**GQA))
    for layer in range(4):
        for letter in "kv":
            weights.layer(layer, f"attention.{letter}")[:] = 1
    layout = NxdLayout(tp=4, kv_multiplier=2, qkv="qkv_linear", kv_order="trn2")
    out = write(tmp_path / "out", weights, layout)
    with pytest.raises(UserError, match="do not show whether the order is trn1 or trn2; pass --source-layout"):
        open_nxd(out, weights.model)
    found = open_nxd(out, weights.model, {"kv_order": "trn2"})
    assert torch.equal(found.read(TensorSlice.full("layers.0.attention.q.weight", (32, 32))), attention(weights)[0])
    assert mismatched_copy(found) is None


def test_kv_heads_in_trn2_order_are_not_read_as_trn1(tmp_path: Path) -> None:
    weights = RandomWeights(llama(**GQA))
    out = write(tmp_path / "out", weights, NxdLayout(tp=4, kv_multiplier=2, qkv="qkv_linear", kv_order="trn2"))
    with pytest.raises(UserError, match="its kv heads are in trn2 order, not trn1; pass --source-layout kv_order=trn2"):
        open_nxd(out, weights.model, {"kv_order": "trn1"})
    assert open_nxd(out, weights.model).notes == (
        f"{out / 'model'}: kv_order=trn2, inferred from the replicas of its kv heads",
    )
