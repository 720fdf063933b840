"""`trainyard convert-nxd`: the flags of NxD's checkpoint_converter.py, as existing scripts use them."""

import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.cli.conftest import Call, fail, succeed
from tests.formats.test_nxd import GQA, RandomWeights, llama, load_rank
from trainyard.cli.commands import convert_nxd
from trainyard.families.builtin.llama import LlamaConfig
from trainyard.families.builtin.mixtral import MixtralConfig
from trainyard.families.decoder import DecoderConfig
from trainyard.formats.hf import write_hf
from trainyard.formats.nxd.layout import KvOrder, NxdLayout, QkvKind, valid_kv_multipliers

MHA = llama(hidden=32, heads=8, layers=4)
"""A model with as many kv heads as heads."""
FROM, TO = "--convert_from_full_state", "--convert_to_full_state"


def full_state(tmp_path: Path, model: DecoderConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Write one file of weights and a config.json, the input of NxD's converter."""
    write_hf(tmp_path / "hf", RandomWeights(model, dtype))
    shutil.move(tmp_path / "hf" / "config.json", tmp_path / "config.json")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    shutil.rmtree(tmp_path / "hf")
    torch.save({"model": state}, tmp_path / "full.pt")
    return state


def nxd(input_dir: str, output_dir: str, *flags: Any, backend: str = "trn1") -> list[str]:
    paths = ["--input_dir", input_dir, "--output_dir", output_dir, "--config", "config.json", "--hw_backend", backend]
    return ["convert-nxd", *paths, *map(str, flags)]


def test_every_flag_of_the_reference_is_accepted(call: Call, tmp_path: Path) -> None:
    state = full_state(tmp_path, llama(**GQA))
    lines = (
        "--model_key model --tp_size 2 --pp_size 2 --ep_size 1 --virtual_pp_size 1 --n_layers 4 --coalesce_qkv False",
        "--kv_size_multiplier 1 --qkv_linear True --fuse_qkv False --i_tp_round_factor 0 --pad_attn_heads False",
        "--load_xser False --save_xser True --model_style hf",
    )
    common = " ".join(lines).split()
    succeed(call(*nxd("full.pt", "out", *common, FROM, "True")))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model", "checkpoint", "done", "config.json"}
    succeed(call(*nxd("out/model", "back", *common, "--load_xser", "True", TO)))
    found = torch.load(tmp_path / "back" / "checkpoint.pt", weights_only=True)
    assert found.keys() == state.keys()
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize(
    ("flags", "on"),
    [
        *[(["--save_xser", value], False) for value in ("False", "false", "FALSE", "0", "no", "")],
        *[(["--save_xser", value], True) for value in ("True", "true", "1", "yes")],
        (["--save_xser"], True),
        (["--save_xser=False"], False),
        ([], False),
        (["--save_xser", "False", "--load_xser"], False),
    ],
)
def test_boolean_values_are_parsed(flags: list[str], on: bool, call: Call, tmp_path: Path) -> None:
    """In the reference any value, even `False`, is true."""
    full_state(tmp_path, MHA)
    succeed(call(*nxd("full.pt", "out", *flags, FROM)))
    assert any(path.name.endswith(".tensors") for path in (tmp_path / "out" / "model").iterdir()) == on


@pytest.mark.parametrize("value", ["maybe", "2", "None"])
def test_invalid_boolean_values_are_rejected(value: str, call: Call) -> None:
    message = f"convert-nxd: argument --save_xser: {value}: expected true or false"
    fail(call(*nxd("full.pt", "out", "--save_xser", value, FROM)), message)


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ([], 0),
        ([FROM, "False"], 0),
        ([FROM, TO], 2),
        ([FROM, "--convert_to_xser"], 2),
        (["--convert_from_xser", "--convert_to_xser"], 2),
        ([FROM, "--convert_to_full_model"], 2),
    ],
)
def test_exactly_one_direction(flags: list[str], count: int, call: Call) -> None:
    message = f"convert-nxd: exactly one of {FROM}, {TO}, --convert_from_xser, --convert_to_xser is needed, not {count}"
    fail(call(*nxd("full.pt", "out", *flags)), message)


@pytest.mark.parametrize("direction", ["--convert_from_full_model", f"--convert_to_xser False {FROM}"])
def test_a_renamed_direction_and_directions_set_to_false(direction: str, call: Call, tmp_path: Path) -> None:
    state = full_state(tmp_path, MHA)
    succeed(call(*nxd("full.pt", "out", *direction.split())))
    succeed(call(*nxd("out", "back", "--convert_to_full_model")))
    found = torch.load(tmp_path / "back" / "checkpoint.pt", weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--ep_size 2", "ep_size=2: a llama model has no experts; nearest: 1"),
        ("--i_tp_round_factor 8", "--i_tp_round_factor 8: padding of the MLP is not supported"),
        ("--pad_attn_heads True", "--pad_attn_heads True: padding of heads is not supported"),
        ("--hf_model_name meta/x", "--hf_model_name meta/x: not with --input_dir full.pt; only with"),
        ("--nxdt_yaml_config x.yaml", "--nxdt_yaml_config x.yaml: use --config config.json"),
        ("--model_key weights", "--model_key weights: weights must be under the key model, or at the top level"),
        ("--what 1", "convert-nxd: unrecognized arguments: --what 1"),
        ("--tp 2", "convert-nxd: unrecognized arguments: --tp 2"),
        ("--tp_size two", "convert-nxd: argument --tp_size: invalid int value: 'two'"),
        ("--tp_size 0", "tp_size=0: must be 1 or more"),
        ("--tp_size 0 --qkv_linear", "tp_size=0: must be 1 or more"),
        ("--tp_size 4", "kv_size_multiplier=1: .* nearest: qkv=qkv_linear with kv_size_multiplier=2"),
        ("--n_layers 5", "--n_layers 5: config.json has 4 layers"),
        ("--pp_size 2 --pipeline_cuts 1,x", "--pipeline_cuts 1,x: expected layer numbers such as 9,19,29"),
        ("--hw_backend trn3", "convert-nxd: argument --hw_backend: invalid choice: 'trn3'"),
        ("--input_dir nowhere.pt", "nowhere.pt: no such file or directory"),
        ("--output_dir config.json", "config.json: .*not empty"),
        ("--config nowhere.json", "nowhere.json: not a readable config.json"),
    ],
)
def test_unsupported_flags_are_rejected_by_name(flags: str, message: str, call: Call, tmp_path: Path) -> None:
    full_state(tmp_path, llama(**GQA))
    fail(call(*nxd("full.pt", "out", *flags.split(), FROM)), message)
    assert {path.name for path in tmp_path.iterdir()} == {"full.pt", "config.json"}


def test_missing_flags_are_named(call: Call) -> None:
    fail(call("convert-nxd", FROM), "convert-nxd: .*required: --output_dir")
    fail(call("convert-nxd", FROM, "--output_dir", "x"), "--input_dir: missing")


def test_order_of_kv_heads_defaults_to_trn1(call: Call, tmp_path: Path) -> None:
    """Scripts for NxD's converter leave out --hw_backend on trn1."""
    full_state(tmp_path, llama(**GQA))
    flags = ["--tp_size", "4", "--kv_size_multiplier", "2", "--qkv_linear", "True", FROM]
    succeed(call(*nxd("full.pt", "named", *flags)))
    backend = ["--hw_backend", "trn1"]
    succeed(call(*(word for word in nxd("full.pt", "default", *flags) if word not in backend)))
    files = sorted(path.relative_to(tmp_path / "named") for path in (tmp_path / "named").rglob("*.pt"))
    assert files
    assert all((tmp_path / "named" / file).read_bytes() == (tmp_path / "default" / file).read_bytes() for file in files)


MODEL_KINDS: dict[str, tuple[LlamaConfig, list[str]]] = {
    "separate": (llama(**GQA), []),
    "qkv_linear": (llama(**GQA), ["--qkv_linear", "True"]),
    "fused": (llama(**GQA), ["--qkv_linear", "True", "--fuse_qkv", "True"]),
    "coalesced": (MHA, ["--coalesce_qkv", "True"]),
    "tied": (llama(**GQA, tie_embeddings=True, vocab=61), ["--qkv_linear", "True"]),
    "megatron": (llama(**GQA), ["--model_style", "megatron"]),
    "megatron with MHA": (MHA, ["--model_style", "megatron"]),
}


def round_trips(kind: str) -> Iterator[tuple[list[Any], str, bool]]:
    """Yield flags, backend and xser of every layout that a model of this kind supports."""
    model, flags = MODEL_KINDS[kind]
    qkv: QkvKind = "qkv_linear" if "--qkv_linear" in flags else "separate"
    backends: tuple[KvOrder, ...] = ("trn1", "trn2")
    for number, (tp, pp, backend) in enumerate(product((1, 2, 4), (1, 2), backends)):
        for times in valid_kv_multipliers(model, NxdLayout(tp, qkv=qkv, kv_order=backend)):
            sizes = ["--tp_size", tp, "--pp_size", pp, "--kv_size_multiplier", times]
            yield [*flags, *sizes], backend, number % 2 == 0


NIGHTLY_KINDS = ("separate", "fused", "coalesced", "megatron with MHA")
"""Close to `qkv_linear` and `megatron`, which stay in the fast tier."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind in NIGHTLY_KINDS)) for kind in MODEL_KINDS]
)
def test_round_trips_are_bit_exact(kind: str, call: Call, tmp_path: Path) -> None:
    state = full_state(tmp_path, MODEL_KINDS[kind][0], torch.bfloat16)
    tried = 0
    for flags, backend, xser in round_trips(kind):
        succeed(call(*nxd("full.pt", "out", *flags, "--save_xser", xser, FROM, backend=backend)))
        succeed(call(*nxd("out/model", "back", *flags, "--load_xser", xser, TO, backend=backend)))
        found = torch.load(tmp_path / "back" / "checkpoint.pt", weights_only=True)
        assert list(found) == list(state)
        for name, value in state.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), (flags, name)
        shutil.rmtree(tmp_path / "out")
        shutil.rmtree(tmp_path / "back")
        tried += 1
    assert tried >= 8


def test_omitted_layout_is_inferred_from_the_files(call: Call, tmp_path: Path) -> None:
    """Layout and style may be omitted; if given, they must match the files."""
    state = full_state(tmp_path, llama(**GQA))
    flags = ["--tp_size", 2, "--pp_size", 2, "--model_style", "megatron"]
    succeed(call(*nxd("full.pt", "out", *flags, FROM)))
    succeed(call(*nxd("out", "back", TO)))
    found = torch.load(tmp_path / "back" / "checkpoint.pt", weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in state.items())
    fail(call(*nxd("out", "no", "--model_style", "hf", TO)), ".*model_style=hf was given, but its files have megatron")
    fail(call(*nxd("out", "no", "--tp_size", "4", TO)), ".*tp_size=4 was given, but its files have 2")
    fail(call(*nxd("full.pt", "out", FROM)), "out: .*not empty")
    fail(call(*nxd("out", "back", TO)), "back: .*not empty")
    fail(call(*nxd("out", "full.pt", TO)), "full.pt: .*not empty")
    fail(call(*nxd("out", "full.pt/x", TO)), "full.pt/x: cannot be created")


def test_an_interrupted_full_state_leaves_nothing(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_state(tmp_path, MHA)
    succeed(call(*nxd("full.pt", "out", FROM)))
    real = convert_nxd.hf_tensors

    def interrupted(weights: Any) -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(real(weights)):
            if number == 5:
                raise KeyboardInterrupt
            yield pair

    monkeypatch.setattr(convert_nxd, "hf_tensors", interrupted)
    fail(call(*nxd("out", "back", TO)), "interrupted", code=130)
    assert {path.name for path in tmp_path.iterdir()} == {"full.pt", "config.json", "out"}


def test_xser_round_trip(call: Call, tmp_path: Path) -> None:
    """Both directions raise TypeError in the reference. They need no model."""
    full_state(tmp_path, llama(**GQA))
    succeed(call(*nxd("full.pt", "plain", "--tp_size", "2", "--pp_size", "2", FROM)))
    flags = ["--hw_backend", "trn1", "--tp_size", "2", "--pp_size", "2"]
    paths = ["--input_dir", "plain/model", "--output_dir", "xser"]
    assert succeed(call("convert-nxd", *paths, *flags, "--convert_to_xser")) == "xser: xser\n"
    files = sorted(path.name for path in (tmp_path / "xser" / "model").iterdir())
    assert len(files) == 4 * 3  # references, tensors and their metadata
    paths = ["--input_dir", "xser", "--output_dir", "back"]
    assert succeed(call("convert-nxd", *paths, *flags, "--convert_from_xser", "True")) == "back: no xser\n"
    for rank in product(range(2), range(2)):
        one, two = load_rank(tmp_path / "plain", *rank), load_rank(tmp_path / "back", *rank)
        assert list(one) == list(two)
        assert all(torch.equal(one[name], two[name]) for name in one)
    paths = ["--input_dir", "nowhere", "--output_dir", "out"]
    fail(call("convert-nxd", *paths, *flags, "--convert_to_xser"), "nowhere: no NxD checkpoint")


LLAMA_ONLY = {"attention_bias", "mlp_bias", "activation"}
MIXTRAL = MixtralConfig(
    **{**llama(**GQA, ffn=20).model_dump(exclude_none=True, exclude=LLAMA_ONLY), "family": "mixtral", "experts": 4}
)


@pytest.mark.parametrize("xser", [False, True])
def test_experts_on_expert_parallel_ranks(xser: bool, call: Call, tmp_path: Path) -> None:
    state = full_state(tmp_path, MIXTRAL, torch.bfloat16)
    sizes = ["--tp_size", 4, "--pp_size", 2, "--ep_size", 2, "--kv_size_multiplier", 2, "--qkv_linear", "True"]
    succeed(call(*nxd("full.pt", "out", *sizes, "--save_xser", xser, FROM)))
    assert len(list((tmp_path / "out" / "model").glob("dp_rank_00_ep_rank_??_tp_rank_??_pp_rank_??.pt"))) == 16
    succeed(call(*nxd("out/model", "back", *sizes, TO)))
    direction = "--convert_from_xser" if xser else "--convert_to_xser"
    succeed(
        call("convert-nxd", "--input_dir", "out/model", "--output_dir", "repacked", "--hw_backend", "trn1", direction)
    )
    succeed(call(*nxd("repacked", "again", TO)))
    for name in ("back", "again"):
        found = torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        assert list(found) == list(state)
        assert all(torch.equal(found[key], value) for key, value in state.items())
    fail(call(*nxd("out", "no", "--ep_size", "4", TO)), ".*: ep_size=4 was given, but its files have 2; omit it")


def test_what_experts_do_not_allow_is_one_line(call: Call, tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", RandomWeights(MIXTRAL))

    def to_nxd(layout: str) -> tuple[int, str, str]:
        return call("convert", "hf", "nxd", "--to", "nxd", "--layout", layout)

    fail(to_nxd("ep=3"), "ep_size=3: does not divide experts=4; nearest: 2")
    fail(to_nxd("tp=8"), "tp_size=8: does not divide ffn=20; nearest: 4")
    fail(to_nxd("style=megatron"), "model_style=megatron: not supported for mixtral; use hf")
    assert not (tmp_path / "nxd").exists()
    succeed(to_nxd("tp=2,ep=2"))
    assert "ep=2" in succeed(call("inspect", "nxd"))
    ranks = tmp_path / "nxd" / "model"
    state = torch.load(ranks / "dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt", weights_only=True)
    changed = {**state, "model.norm.weight": state["model.norm.weight"] + 1}
    torch.save(changed, ranks / "dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt")
    fail(call("convert", "nxd", "back"), "nxd/model: the copies in model.norm.weight differ between ranks")
    (ranks / "dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt").unlink()
    fail(call("convert", "nxd", "back"), "nxd/model: 1 of 4 ranks are missing: ep_rank_01_tp_rank_00_pp_rank_00")
    assert not (tmp_path / "back").exists()


def test_help_describes_every_flag(call: Call) -> None:
    out = succeed(call("convert-nxd", "--help"))
    parser = convert_nxd.build_parser()
    for action in parser._actions:
        assert action.help
        assert all(option in out for option in action.option_strings)
