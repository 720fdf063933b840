"""`trainyard convert` and `trainyard convert-nxd` as a person or an old script calls them."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint.test_nxd import GQA, Memory, llama, loaded
from tests.support import configs
from trainyard.checkpoint.formats.hf import write_hf
from trainyard.checkpoint.formats.nxd.layout import KvOrder, NxdLayout, QkvKind, valid_kv_multipliers
from trainyard.checkpoint.formats.tensor_map import full_index, unfused_shapes
from trainyard.checkpoint.registry import open_weights
from trainyard.cli import convert as verb
from trainyard.cli import convert_nxd, main
from trainyard.config.model_schema import LlamaConfig
from trainyard.train.trainer import Trainer

Call = Callable[..., tuple[int, str, str]]
ZERO = re.compile(r"^largest logit difference 0 \(logits up to \S+\)$", re.M)


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """What is asked here is not whether it outlives a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Runs the command in `tmp_path`; gives its exit code and what it said."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trainyard", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main.main()
        out, err = capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return run


def well(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert code == 0, err
    assert not err
    return out


def mistake(result: tuple[int, str, str], says: str, code: int = 2) -> None:
    found, _, err = result
    assert found == code, err
    assert err.count("\n") == 1, err
    assert re.match(f"trainyard: {says}", err), err


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    write_hf(tmp_path / "hf", Memory(llama(**GQA)))
    return tmp_path / "hf"


def values(directory: Path) -> dict[str, Tensor]:
    weights = open_weights(directory).weights
    return {part: weights.read(part, full_index(shape)) for part, shape in unfused_shapes(weights.model).items()}


# convert


def test_a_way_through_all_forms_is_checked(call: Call, hf: Path, tmp_path: Path) -> None:
    layout = "tp=4,pp=2,pipeline_cuts=0,qkv=qkv_linear,kv_multiplier=2,kv_order=trn2,vocab=64"
    out = well(call("convert", "hf", "nxd", "--to", "nxd", "--layout", layout, "--xser", "--check"))
    assert re.search(r"^hf: a Hugging Face directory, llama with [\d,]+ weights$", out, re.M)
    assert re.search(r"^nxd: [\d.]+ MiB in [\d.]+ s \([\d,]+ MiB/s\)$", out, re.M)
    assert ZERO.search(out)
    out = well(call("convert", "nxd", "ours", "--to", "native", "--layout", "tp=2,dp=2", "--check"))
    assert "nxd: an NxD checkpoint" in out
    assert "weights alone: resume with checkpoint.weights_only=true" in out
    assert ZERO.search(out)
    out = well(call("convert", "ours", "back", "--check"))
    assert "ours: a checkpoint of trainyard" in out
    assert ZERO.search(out)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (hf / name).read_bytes()


@pytest.mark.parametrize(
    "layout", ["style=megatron,qkv=qkv_linear,by_head=false", "pp=1,vpp=2,pipeline_cuts=1", "tp=2,vocab=128"]
)
def test_what_the_files_do_not_show_is_no_hindrance_to_the_check(layout: str, call: Call, hf: Path) -> None:
    assert ZERO.search(well(call("convert", "hf", "nxd", "--to", "nxd", "--layout", layout, "--check")))


@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_a_run_becomes_a_model(family: str, call: Call, tmp_path: Path) -> None:
    sections = {
        "checkpoint": {"every": 2, "export_hf": True},
        "log": {"directory": str(tmp_path)},
        "train": {"steps": 2},
    }
    Trainer(configs.tiny_config(family, **sections)).run()
    assert ZERO.search(well(call("convert", "run", "model", "--check")))
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (
        tmp_path / "run" / "model" / "model.safetensors"
    ).read_bytes()
    out = well(call("convert", "run/checkpoints", "other", "--to", "native", "--layout", "tp=2,pp=2", "--check"))
    assert "with the optimizer's state" in out
    assert ZERO.search(out)
    mistake(call("convert", "run", "half", "--to", "native", "--dtype", "bf16"), "--dtype: .* nearest: --weights-only")
    out = well(call("convert", "run", "half", "--to", "native", "--dtype", "bf16", "--weights-only", "--check"))
    assert re.search(r"^largest logit difference 0\.00\d+ ", out, re.M)


def test_a_checkpoint_at_a_url(call: Call, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/run"
    checkpoint = {"every": 1, "export_hf": True, "directory": url}
    summary = Trainer(
        configs.tiny_config("gpt", checkpoint=checkpoint, log={"directory": str(tmp_path)}, train={"steps": 1})
    ).run()
    assert f"{url}: a checkpoint of trainyard" in well(call("convert", url, "out"))
    assert summary.exported_weights
    one, two = (load_file(path / "model.safetensors") for path in (summary.exported_weights, tmp_path / "out"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    mistake(call("convert", "memory://nowhere", "out2"), "memory://nowhere: no checkpoint of trainyard")
    mistake(call("convert", "out", "s3://bucket/out"), "s3:/bucket/out: a directory of this machine was expected")


def test_rounding_is_told_and_is_no_mistake(call: Call, hf: Path) -> None:
    out = well(call("convert", "hf", "half", "--dtype", "bf16", "--check"))
    assert "largest logit difference" in out
    assert not ZERO.search(out)
    assert ZERO.search(well(call("convert", "half", "again", "--dtype", "fp32", "--check")))
    assert ZERO.search(well(call("convert", "half", "nxd", "--to", "nxd", "--check")))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x40  # the exponent of the last weight of the norm or the head
    path.write_bytes(data)


def poison(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-4] + b"\x00\x00\xc0\x7f")  # not a number


@pytest.mark.parametrize("harm", [flip, poison])
@pytest.mark.parametrize("dtype", [[], ["--dtype", "fp32"]])
def test_a_wrong_output_is_found(
    harm: Callable[[Path], None], dtype: list[str], call: Call, hf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = verb.carry_over

    def wrong(opened: Any, source: Path, directory: Path, *rest: Any) -> None:
        real(opened, source, directory, *rest)
        harm(directory / "model.safetensors")

    monkeypatch.setattr(verb, "carry_over", wrong)
    mistake(call("convert", "hf", "out", "--check", *dtype), "out: not the model that hf holds", code=1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["hf", "hf"], "hf: is there already and not empty"),
        (["nowhere", "out"], "nowhere: no such file or directory"),
        (["hf"], "Missing "),
        (["hf", "out", "--to", "onnx"], ".*'onnx' is not one of 'hf', 'nxd', 'native'"),
        (["hf", "out", "--dtype", "int8"], ".*'int8' is not one of 'fp32', 'bf16', 'fp16'"),
        (["hf", "out", "--layout", "tp=2"], "--layout tp=2: hf takes no layout"),
        (["hf", "out", "--to", "nxd", "--layout", "tp=7"], "tp_size=7: does not divide heads=8; nearest: 8"),
        (["hf", "out", "--to", "native", "--layout", "cp=0"], "--layout cp=0: wanted a number from 1 up"),
        (["hf", "out", "--source-layout", "tp=x"], "--source-layout tp=x: wanted a number from 1 up"),
        (["hf", "out", "--source-layout", "tpp=2"], "--source-layout tpp=2: nxd takes tp"),
        (["hf", "out", "--xser"], "--xser: goes with --to nxd, not hf"),
        (["hf", "out", "--config", "nowhere.json"], "nowhere.json: not a readable config.json"),
        (["hf/model.safetensors/x", "out"], ".*no such file or directory"),
    ],
)
def test_mistakes_are_one_line(words: list[str], says: str, call: Call, hf: Path, tmp_path: Path) -> None:
    mistake(call("convert", *words), says)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_ctrl_c_leaves_nothing(call: Call, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pressed(verb.ProgressDisplay):
        def show(self, done: int, total: int, words: str = "") -> None:
            if done > total / 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(verb, "Screen", Pressed)
    for form in ("hf", "nxd", "native"):
        mistake(call("convert", "hf", "out", "--to", form), "interrupted", code=130)
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_full_disk_is_one_line(call: Call, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "out")

    monkeypatch.setattr(verb.ProgressDisplay, "show", full)
    for form in ("hf", "nxd", "native"):
        mistake(call("convert", "hf", "out", "--to", form), "out: No space left on device", code=1)
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_help_teaches(call: Call) -> None:
    out = " ".join(well(call("convert", "--help")).split())
    for words in ("Examples:", "trainyard convert runs/my-run hf-model", "--source-layout", "kv_order (trn1, trn2)"):
        assert words in out
    out = well(call("convert-nxd", "--help"))
    parser = convert_nxd.build_parser()
    for action in parser._actions:
        assert action.help
        assert all(option in out for option in action.option_strings)


# convert-nxd

MHA = llama(hidden=32, heads=8, layers=4)
"""As many kv heads as heads."""
FROM, TO = "--convert_from_full_state", "--convert_to_full_state"


def full_state(tmp_path: Path, model: LlamaConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """One file of weights and a config.json, as NxD's converter takes them."""
    write_hf(tmp_path / "hf", Memory(model, dtype))
    shutil.move(tmp_path / "hf" / "config.json", tmp_path / "config.json")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    shutil.rmtree(tmp_path / "hf")
    torch.save({"model": state}, tmp_path / "full.pt")
    return state


def nxd(input_dir: str, output_dir: str, *words: Any, backend: str = "trn1") -> list[str]:
    paths = ["--input_dir", input_dir, "--output_dir", output_dir, "--config", "config.json", "--hw_backend", backend]
    return ["convert-nxd", *paths, *map(str, words)]


def test_every_flag_of_old_is_accepted(call: Call, tmp_path: Path) -> None:
    state = full_state(tmp_path, llama(**GQA))
    lines = (
        "--model_key model --tp_size 2 --pp_size 2 --ep_size 1 --virtual_pp_size 1 --n_layers 4 --coalesce_qkv False",
        "--kv_size_multiplier 1 --qkv_linear True --fuse_qkv False --i_tp_round_factor 0 --pad_attn_heads False",
        "--load_xser False --save_xser True --model_style hf",
    )
    common = " ".join(lines).split()
    well(call(*nxd("full.pt", "out", *common, FROM, "True")))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model", "checkpoint", "done", "config.json"}
    well(call(*nxd("out/model", "back", *common, "--load_xser", "True", TO)))
    found = torch.load(tmp_path / "back" / "checkpoint.pt", weights_only=True)
    assert found.keys() == state.keys()
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize(
    ("words", "on"),
    [
        *[(["--save_xser", word], False) for word in ("False", "false", "FALSE", "0", "no", "")],
        *[(["--save_xser", word], True) for word in ("True", "true", "1", "yes")],
        (["--save_xser"], True),
        (["--save_xser=False"], False),
        ([], False),
        (["--save_xser", "False", "--load_xser"], False),
    ],
)
def test_booleans_mean_what_they_say(words: list[str], on: bool, call: Call, tmp_path: Path) -> None:
    """`False` was true in the reference, as any word was."""
    full_state(tmp_path, MHA)
    well(call(*nxd("full.pt", "out", *words, FROM)))
    assert any(path.name.endswith(".tensors") for path in (tmp_path / "out" / "model").iterdir()) == on


@pytest.mark.parametrize("word", ["maybe", "2", "None"])
def test_booleans_that_say_nothing(word: str, call: Call) -> None:
    says = f"convert-nxd: argument --save_xser: {word}: wanted true or false"
    mistake(call(*nxd("full.pt", "out", "--save_xser", word, FROM)), says)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ([], 0),
        ([FROM, "False"], 0),
        ([FROM, TO], 2),
        ([FROM, "--convert_to_xser"], 2),
        (["--convert_from_xser", "--convert_to_xser"], 2),
        ([FROM, "--convert_to_full_model"], 2),
    ],
)
def test_exactly_one_direction(words: list[str], count: int, call: Call) -> None:
    says = f"convert-nxd: one of {FROM}, {TO}, --convert_from_xser, --convert_to_xser is needed, not {count}"
    mistake(call(*nxd("full.pt", "out", *words)), says)


@pytest.mark.parametrize("direction", ["--convert_from_full_model", f"--convert_to_xser False {FROM}"])
def test_a_direction_by_its_old_name_or_among_others_that_are_off(direction: str, call: Call, tmp_path: Path) -> None:
    state = full_state(tmp_path, MHA)
    well(call(*nxd("full.pt", "out", *direction.split())))
    well(call(*nxd("out", "back", "--convert_to_full_model")))
    found = torch.load(tmp_path / "back" / "checkpoint.pt", weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--ep_size 2", "--ep_size 2: experts are not supported"),
        ("--i_tp_round_factor 8", "--i_tp_round_factor 8: padding of the MLP is not supported"),
        ("--pad_attn_heads True", "--pad_attn_heads True: padding of heads is not supported"),
        ("--hf_model_name meta/x", "--hf_model_name meta/x: nothing is downloaded here; give --input_dir"),
        ("--nxdt_yaml_config x.yaml", "--nxdt_yaml_config x.yaml: give --config config.json"),
        ("--model_key weights", "--model_key weights: weights are looked for under model, or bare"),
        ("--what 1", "convert-nxd: unrecognized arguments: --what 1"),
        ("--tp 2", "convert-nxd: unrecognized arguments: --tp 2"),
        ("--tp_size two", "convert-nxd: argument --tp_size: invalid int value: 'two'"),
        ("--tp_size 0", "tp_size=0: must be 1 or more"),
        ("--tp_size 0 --qkv_linear", "tp_size=0: must be 1 or more"),
        ("--tp_size 4", "kv_size_multiplier=1: .* nearest that works: qkv=qkv_linear with kv_size_multiplier=2"),
        ("--n_layers 5", "--n_layers 5: config.json has 4 layers"),
        ("--pp_size 2 --pipeline_cuts 1,x", "--pipeline_cuts 1,x: wanted layer numbers such as 9,19,29"),
        ("--hw_backend trn3", "convert-nxd: argument --hw_backend: invalid choice: 'trn3'"),
        ("--input_dir nowhere.pt", "nowhere.pt: no such file or directory"),
        ("--output_dir config.json", "config.json: is there already and not empty"),
        ("--config nowhere.json", "nowhere.json: not a readable config.json"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(words: str, says: str, call: Call, tmp_path: Path) -> None:
    full_state(tmp_path, llama(**GQA))
    mistake(call(*nxd("full.pt", "out", *words.split(), FROM)), says)
    assert {path.name for path in tmp_path.iterdir()} == {"full.pt", "config.json"}


def test_what_is_missing_is_named(call: Call) -> None:
    mistake(call("convert-nxd", FROM), "convert-nxd: .*required: --output_dir, --hw_backend")
    mistake(call("convert-nxd", FROM, "--output_dir", "x", "--hw_backend", "trn1"), "--input_dir: missing")


KINDS: dict[str, tuple[LlamaConfig, list[str]]] = {
    "separate": (llama(**GQA), []),
    "qkv_linear": (llama(**GQA), ["--qkv_linear", "True"]),
    "fused": (llama(**GQA), ["--qkv_linear", "True", "--fuse_qkv", "True"]),
    "coalesced": (MHA, ["--coalesce_qkv", "True"]),
    "tied": (llama(**GQA, tie_embeddings=True, vocab=61), ["--qkv_linear", "True"]),
    "megatron": (llama(**GQA), ["--model_style", "megatron"]),
    "megatron of all heads": (MHA, ["--model_style", "megatron"]),
}


def round_trips(kind: str) -> Iterator[tuple[list[Any], str, bool]]:
    """Flags, backend and xser of every layout that a model of this kind has."""
    model, words = KINDS[kind]
    qkv: QkvKind = "qkv_linear" if "--qkv_linear" in words else "separate"
    backends: tuple[KvOrder, ...] = ("trn1", "trn2")
    for number, (tp, pp, backend) in enumerate(product((1, 2, 4), (1, 2), backends)):
        for times in valid_kv_multipliers(model, NxdLayout(tp, qkv=qkv, kv_order=backend)):
            sizes = ["--tp_size", tp, "--pp_size", pp, "--kv_size_multiplier", times]
            yield [*words, *sizes], backend, number % 2 == 0


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_bit_for_bit(kind: str, call: Call, tmp_path: Path) -> None:
    state = full_state(tmp_path, KINDS[kind][0], torch.bfloat16)
    tried = 0
    for words, backend, xser in round_trips(kind):
        well(call(*nxd("full.pt", "out", *words, "--save_xser", xser, FROM, backend=backend)))
        well(call(*nxd("out/model", "back", *words, "--load_xser", xser, TO, backend=backend)))
        found = torch.load(tmp_path / "back" / "checkpoint.pt", weights_only=True)
        assert list(found) == list(state)
        for name, value in state.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), (words, name)
        shutil.rmtree(tmp_path / "out")
        shutil.rmtree(tmp_path / "back")
        tried += 1
    assert tried >= 8


def test_the_files_show_what_was_not_said(call: Call, tmp_path: Path) -> None:
    """Layout and style need not be given again; what is given must be so."""
    state = full_state(tmp_path, llama(**GQA))
    words = ["--tp_size", 2, "--pp_size", 2, "--model_style", "megatron"]
    well(call(*nxd("full.pt", "out", *words, FROM)))
    well(call(*nxd("out", "back", TO)))
    found = torch.load(tmp_path / "back" / "checkpoint.pt", weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in state.items())
    mistake(
        call(*nxd("out", "no", "--model_style", "hf", TO)), ".*model_style=hf was given, but its files have megatron"
    )
    mistake(call(*nxd("out", "no", "--tp_size", "4", TO)), ".*tp_size=4 was given, but its files have 2")
    mistake(call(*nxd("full.pt", "out", FROM)), "out: is there already and not empty")
    mistake(call(*nxd("out", "back", TO)), "back: is there already and not empty")
    mistake(call(*nxd("out", "full.pt", TO)), "full.pt: is there already and not empty")
    mistake(call(*nxd("out", "full.pt/x", TO)), "full.pt/x: cannot be made")


def test_one_file_that_is_not_finished_leaves_nothing(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_state(tmp_path, MHA)
    well(call(*nxd("full.pt", "out", FROM)))
    real = convert_nxd.hf_tensors

    def interrupted(weights: Any) -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(real(weights)):
            if number == 5:
                raise KeyboardInterrupt
            yield pair

    monkeypatch.setattr(convert_nxd, "to_tensors", interrupted)
    mistake(call(*nxd("out", "back", TO)), "interrupted", code=130)
    assert {path.name for path in tmp_path.iterdir()} == {"full.pt", "config.json", "out"}


def test_xser_and_back(call: Call, tmp_path: Path) -> None:
    """These two directions end in a TypeError in the reference. They need no model."""
    full_state(tmp_path, llama(**GQA))
    well(call(*nxd("full.pt", "plain", "--tp_size", "2", "--pp_size", "2", FROM)))
    flags = ["--hw_backend", "trn1", "--tp_size", "2", "--pp_size", "2"]
    paths = ["--input_dir", "plain/model", "--output_dir", "xser"]
    assert well(call("convert-nxd", *paths, *flags, "--convert_to_xser")) == "xser: xser\n"
    files = sorted(path.name for path in (tmp_path / "xser" / "model").iterdir())
    assert len(files) == 4 * 3  # references, tensors and what they are
    paths = ["--input_dir", "xser", "--output_dir", "back"]
    assert well(call("convert-nxd", *paths, *flags, "--convert_from_xser", "True")) == "back: no xser\n"
    for rank in product(range(2), range(2)):
        one, two = loaded(tmp_path / "plain", *rank), loaded(tmp_path / "back", *rank)
        assert list(one) == list(two)
        assert all(torch.equal(one[name], two[name]) for name in one)
    paths = ["--input_dir", "nowhere", "--output_dir", "out"]
    mistake(call("convert-nxd", *paths, *flags, "--convert_to_xser"), "nowhere: no NxD checkpoint here")
