"""Shards that NxD's own converter wrote (golden/nxd), and replicas of key and value heads that differ."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.formats.test_nxd import GQA, RandomWeights, edit_rank, llama, load_rank, write
from tests.support.forkserver import ForkServer
from trainyard.checkpoint.weights import unfused_tensors
from trainyard.core.errors import UserError
from trainyard.formats.hf import hf_tensors, open_hf
from trainyard.formats.nxd.layout import NxdLayout
from trainyard.formats.nxd.rank_files import open_nxd

GOLDEN = Path(__file__).parent / "golden" / "nxd"
INFERRED = "kv_order=trn1, inferred from the replicas of its kv heads; pass --source-layout kv_order=trn2 if"
CONVERTER = "as NxD's converter writes them for trn2"


@pytest.mark.parametrize(
    ("name", "hints", "note"),
    [
        ("trn1-tp4-kv2", {}, INFERRED),
        ("trn1-tp4-kv2", {"kv_order": "trn1"}, None),
        ("trn2-tp4-kv2", {"kv_order": "trn2"}, CONVERTER),
        ("trn1-tp2-pp2", {}, None),
        ("trn1-tp2-pp2", {"kv_order": "trn2"}, None),
    ],
)
def test_upstreams_shards_give_the_model_back_bit_for_bit(name: str, hints: dict[str, Any], note: str | None) -> None:
    expected = load_file(GOLDEN / "hf" / "model.safetensors")
    weights = open_nxd(GOLDEN / name, open_hf(GOLDEN / "hf").model, hints)
    found = dict(hf_tensors(weights))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key].view(torch.uint8), value.view(torch.uint8)), key
    assert len(weights.notes) == (note is not None)
    assert note is None or note in weights.notes[0]


@pytest.mark.parametrize(
    ("flag", "order"),
    [pytest.param("--source-layout", "kv_order=trn2", marks=pytest.mark.nightly), ("--hw_backend", "trn2")],
)
def test_commands_say_how_they_read_upstreams_shards_for_trn2(
    flag: str, order: str, cli: ForkServer, tmp_path: Path
) -> None:
    """Nothing in these files tells them from trn1's, whose query heads have another order."""
    source, config = str(GOLDEN / "trn2-tp4-kv2"), ["--config", str(GOLDEN / "hf" / "config.json")]
    convert = ["convert", source, "out", *config]
    if flag == "--hw_backend":
        convert = ["convert-nxd", "--input_dir", f"{source}/model", "--output_dir", "out", "--convert_to_full_state"]
        convert += [*config, "--tp_size", "4", "--kv_size_multiplier", "2", "--qkv_linear", "True"]
    done = cli.run([*convert, flag, order], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert CONVERTER in done.stdout
    if flag == "--source-layout":
        expected, found = (load_file(path / "model.safetensors") for path in (GOLDEN / "hf", tmp_path / "out"))
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_converter_says_which_order_it_inferred(cli: ForkServer, tmp_path: Path) -> None:
    """Without --hw_backend, shards for trn2 are taken for trn1's: never without a note."""
    source, config = GOLDEN / "trn2-tp4-kv2" / "model", GOLDEN / "hf" / "config.json"
    flags = ["--input_dir", str(source), "--output_dir", "out", "--config", str(config), "--convert_to_full_state"]
    done = cli.run(
        ["convert-nxd", *flags, "--tp_size", "4", "--kv_size_multiplier", "2", "--qkv_linear", "True"], cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "kv_order=trn1, inferred from the replicas" in done.stdout


REPLICATED = {
    "trn1": (GQA, NxdLayout(tp=4, kv_multiplier=2, qkv="qkv_linear")),
    "trn2": (GQA, NxdLayout(tp=4, kv_multiplier=2, qkv="qkv_linear", kv_order="trn2")),
    "fused": (GQA, NxdLayout(tp=4, kv_multiplier=4, qkv="fused")),
    "one head": ({**GQA, "kv_heads": 1}, NxdLayout(tp=4, kv_multiplier=4, qkv="qkv_linear")),
    "ranks that share a part of their heads": (
        {**GQA, "hidden": 48, "heads": 12, "kv_heads": 3},
        NxdLayout(tp=2, kv_multiplier=2, qkv="qkv_linear"),
    ),
}


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("hinted", [False, True])
@pytest.mark.parametrize("case", REPLICATED)
def test_differing_copies_are_refused(case: str, hinted: bool, layer: int, tmp_path: Path) -> None:
    """Guards against taking the first of several different key heads, whether or not the order was given."""
    changes, layout = REPLICATED[case]
    weights = RandomWeights(llama(**changes))
    out = write(tmp_path / "out", weights, layout)
    key = f"model.layers.{layer}.self_attn.qkv_proj.weight_{'qkv' if layout.qkv == 'fused' else 'k'}"
    last = layout.tp - 1
    changed = load_rank(out, last)[key].clone()
    changed[-1, -1] += 1
    edit_rank(out, lambda state: {**state, key: changed}, tp=last)

    def read_all() -> None:
        opened = open_nxd(out, weights.model, {"kv_order": layout.kv_order} if hinted else {})
        for tensor in unfused_tensors(weights.model).values():
            opened.read(tensor)

    with pytest.raises(UserError, match=f"^{out}/model: the copies in {key} differ between ranks; [^\n]+$"):
        read_all()
