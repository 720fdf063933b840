"""`trainyard convert`: round trips through all formats, the logit check, one-line errors."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.formats.test_nxd import GQA, RandomWeights, llama
from tests.cli.conftest import Call, fail, succeed
from tests.support import configs
from trainyard.checkpoint.formats.hf import write_hf
from trainyard.cli import convert as command
from trainyard.train.trainer import Trainer

ZERO = re.compile(r"^largest logit difference 0 \(logits up to \S+\)$", re.M)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    write_hf(tmp_path / "hf", RandomWeights(llama(**GQA)))
    return tmp_path / "hf"


def test_a_round_trip_through_all_formats_passes_the_check(call: Call, hf: Path, tmp_path: Path) -> None:
    layout = "tp=4,pp=2,pipeline_cuts=0,qkv=qkv_linear,kv_multiplier=2,kv_order=trn2,vocab=64"
    out = succeed(call("convert", "hf", "nxd", "--to", "nxd", "--layout", layout, "--xser", "--check"))
    assert re.search(r"^hf: a Hugging Face directory, llama with [\d,]+ weights$", out, re.M)
    assert re.search(r"^nxd: [\d.]+ MiB in [\d.]+ s \([\d,]+ MiB/s\)$", out, re.M)
    assert ZERO.search(out)
    out = succeed(call("convert", "nxd", "ours", "--to", "native", "--layout", "tp=2,dp=2", "--check"))
    assert "nxd: an NxD checkpoint" in out
    assert "weights only: resume with checkpoint.weights_only=true" in out
    assert ZERO.search(out)
    out = succeed(call("convert", "ours", "back", "--check"))
    assert "ours: a trainyard checkpoint" in out
    assert ZERO.search(out)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (hf / name).read_bytes()


@pytest.mark.parametrize(
    "layout", ["style=megatron,qkv=qkv_linear,by_head=false", "pp=1,vpp=2,pipeline_cuts=1", "tp=2,vocab=128"]
)
def test_the_check_works_for_layouts_that_files_do_not_record(layout: str, call: Call, hf: Path) -> None:
    assert ZERO.search(succeed(call("convert", "hf", "nxd", "--to", "nxd", "--layout", layout, "--check")))


@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_a_run_converts_to_a_model(family: str, call: Call, tmp_path: Path) -> None:
    sections = {
        "checkpoint": {"every": 2, "export_hf": True},
        "log": {"directory": str(tmp_path)},
        "train": {"steps": 2},
    }
    Trainer(configs.tiny_config(family, **sections)).run()
    assert ZERO.search(succeed(call("convert", "run", "model", "--check")))
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (
        tmp_path / "run" / "model" / "model.safetensors"
    ).read_bytes()
    out = succeed(call("convert", "run/checkpoints", "other", "--to", "native", "--layout", "tp=2,pp=2", "--check"))
    assert "with optimizer state" in out
    assert ZERO.search(out)
    fail(call("convert", "run", "half", "--to", "native", "--dtype", "bf16"), "--dtype: .* nearest: --weights-only")
    out = succeed(call("convert", "run", "half", "--to", "native", "--dtype", "bf16", "--weights-only", "--check"))
    assert re.search(r"^largest logit difference 0\.00\d+ ", out, re.M)


def test_a_checkpoint_at_a_url(call: Call, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/run"
    checkpoint = {"every": 1, "export_hf": True, "directory": url}
    summary = Trainer(
        configs.tiny_config("gpt", checkpoint=checkpoint, log={"directory": str(tmp_path)}, train={"steps": 1})
    ).run()
    assert f"{url}: a trainyard checkpoint" in succeed(call("convert", url, "out"))
    assert summary.exported_weights
    one, two = (load_file(path / "model.safetensors") for path in (summary.exported_weights, tmp_path / "out"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    fail(call("convert", "memory://nowhere", "out2"), "memory://nowhere: not a trainyard checkpoint")
    fail(call("convert", "out", "s3://bucket/out"), "s3:/bucket/out: expected a local directory")


def test_rounding_is_reported_and_is_not_an_error(call: Call, hf: Path) -> None:
    out = succeed(call("convert", "hf", "half", "--dtype", "bf16", "--check"))
    assert "largest logit difference" in out
    assert not ZERO.search(out)
    assert ZERO.search(succeed(call("convert", "half", "again", "--dtype", "fp32", "--check")))
    assert ZERO.search(succeed(call("convert", "half", "nxd", "--to", "nxd", "--check")))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x40  # exponent of the last weight of the norm or the head
    path.write_bytes(data)


def poison(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-4] + b"\x00\x00\xc0\x7f")  # not a number


@pytest.mark.parametrize("harm", [flip, poison])
@pytest.mark.parametrize("dtype", [[], ["--dtype", "fp32"]])
def test_wrong_output_is_detected(
    harm: Callable[[Path], None], dtype: list[str], call: Call, hf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = command.convert_checkpoint

    def wrong(opened: Any, source: Path, directory: Path, *rest: Any) -> None:
        real(opened, source, directory, *rest)
        harm(directory / "model.safetensors")

    monkeypatch.setattr(command, "convert_checkpoint", wrong)
    fail(
        call("convert", "hf", "out", "--check", *dtype),
        "out: differs from the hf source although nothing was rounded",
        code=1,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hf", "hf"], "hf: .*not empty"),
        (["nowhere", "out"], "nowhere: no such file or directory"),
        (["hf"], "Missing "),
        (["hf", "out", "--to", "onnx"], ".*'onnx' is not one of 'hf', 'nxd', 'native'"),
        (["hf", "out", "--dtype", "int8"], ".*'int8' is not one of 'fp32', 'bf16', 'fp16'"),
        (["hf", "out", "--layout", "tp=2"], "--layout tp=2: hf takes no layout"),
        (["hf", "out", "--to", "nxd", "--layout", "tp=7"], "tp_size=7: does not divide heads=8; nearest: 8"),
        (["hf", "out", "--to", "native", "--layout", "cp=0"], "--layout cp=0: expected a positive whole number"),
        (["hf", "out", "--source-layout", "tp=x"], "--source-layout tp=x: expected a positive whole number"),
        (["hf", "out", "--source-layout", "tpp=2"], "--source-layout tpp=2: nxd takes tp"),
        (["hf", "out", "--xser"], "--xser: requires --to nxd, not hf"),
        (["hf", "out", "--config", "nowhere.json"], "nowhere.json: not a readable config.json"),
        (["hf/model.safetensors/x", "out"], ".*no such file or directory"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, call: Call, hf: Path, tmp_path: Path) -> None:
    fail(call("convert", *arguments), message)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_ctrl_c_leaves_nothing(call: Call, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class InterruptedDisplay(command.ProgressDisplay):
        def update(self, done: int, total: int, details: str = "") -> None:
            if done > total / 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(command, "ProgressDisplay", InterruptedDisplay)
    for form in ("hf", "nxd", "native"):
        fail(call("convert", "hf", "out", "--to", form), "interrupted", code=130)
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_full_disk_is_one_line(call: Call, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "out")

    monkeypatch.setattr(command.ProgressDisplay, "update", full)
    for form in ("hf", "nxd", "native"):
        fail(call("convert", "hf", "out", "--to", form), "out: No space left on device", code=1)
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_help_names_layout_keys(call: Call) -> None:
    out = " ".join(succeed(call("convert", "--help")).split())
    for text in ("Examples:", "trainyard convert runs/my-run hf-model", "--source-layout", "kv_order (trn1, trn2)"):
        assert text in out
