"""`trainyard convert`: round trips through all formats, the logit check, one-line errors."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.cli.conftest import Call, fail, succeed
from tests.formats.test_nxd import GQA, RandomWeights, llama
from tests.support import configs
from tests.support.file_damage import renew_checksums
from trainyard.cli.commands import convert as command
from trainyard.formats.hf import write_hf
from trainyard.run.trainer import Trainer

ZERO = re.compile(r"^largest logit difference 0 \(logits up to \S+\)$", re.M)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    write_hf(tmp_path / "hf", RandomWeights(llama(**GQA)))
    return tmp_path / "hf"


def test_the_check_loads_config_json_with_transformers(
    call: Call, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses some models that train here."""
    loaded = f"config.json: transformers {transformers.__version__} "
    assert f"{loaded}loads it\n" in succeed(call("convert", "hf", "good", "--check"))
    write_hf(tmp_path / "odd", RandomWeights(llama(hidden=30, head_dim=8)))
    code, _, line = call("convert", "odd", "bad", "--check")
    assert code == 1
    assert "bad/config.json: transformers " in line
    assert "hidden size (30) is not a multiple" in line
    monkeypatch.setitem(sys.modules, "transformers", None)
    out = succeed(call("convert", "odd", "unchecked", "--check"))
    assert "config.json: not checked with transformers, which is not installed\n" in out


def test_a_round_trip_through_all_formats_passes_the_check(call: Call, hf: Path, tmp_path: Path) -> None:
    layout = "tp=4,pp=2,pipeline_cuts=0,qkv=qkv_linear,kv_multiplier=2,kv_order=trn2,vocab=64"
    out = succeed(call("convert", "hf", "nxd", "--to", "nxd", "--layout", layout, "--xser", "--check"))
    assert re.search(r"^hf: a Hugging Face directory, llama with [\d,]+ weights$", out, re.M)
    assert re.search(r"^nxd: [\d.]+ KiB in [\d.]+ s \([\d.,]+ [KM]iB/s\)$", out, re.M)
    assert ZERO.search(out)
    out = succeed(call("convert", "nxd", "ours", "--to", "native", "--layout", "tp=2,dp=2", "--check"))
    assert "nxd: an NxD checkpoint" in out
    assert "weights only: resume with checkpoint.weights_only=true" in out
    assert ZERO.search(out)
    out = succeed(call("convert", "ours", "dcp", "--to", "dcp", "--layout", "names=torchtitan", "--check"))
    assert ZERO.search(out)
    out = succeed(call("convert", "dcp", "again", "--to", "native", "--check-bits"))
    assert "dcp: a checkpoint of torch.distributed.checkpoint" in out
    assert "all 39 tensors are equal bit for bit" in out
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
    fail(call("convert", "memory://nowhere", "out2"), "memory://nowhere: no such file, directory or bucket")


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
    renew_checksums(path)


def poison(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-4] + b"\x00\x00\xc0\x7f")  # not a number
    renew_checksums(path)


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


def nan_weights(tmp_path: Path) -> None:
    """A directory `nan` whose model has a NaN in its last norm."""
    weights = RandomWeights(llama(**GQA))
    weights.tensors["norm.weight"][3] = float("nan")
    write_hf(tmp_path / "nan", weights)


def test_nan_logits_do_not_pass_the_check(call: Call, tmp_path: Path) -> None:
    """All logits of such a model are NaN, whatever the other weights are: comparing them proves nothing."""
    nan_weights(tmp_path)
    fail(
        call("convert", "nan", "out", "--check"), "--check: logits of the hf source are NaN .*nearest: --check-bits", 1
    )
    assert "all 39 tensors are equal bit for bit" in succeed(call("convert", "nan", "out2", "--check-bits"))


def test_a_dtype_of_smaller_range_does_not_pass_the_check(call: Call, tmp_path: Path) -> None:
    weights = RandomWeights(llama(**GQA))
    weights.tensors["norm.weight"][3] = 1e6
    write_hf(tmp_path / "large", weights)
    message = "out: some logits are finite in the hf source only; nearest: a --dtype of wider range"
    fail(call("convert", "large", "out", "--dtype", "fp16", "--check"), message, 1)


@pytest.mark.parametrize("value", [b"\x01\x00\xc0\x7f", b"\x00\x00\x00\x80"], ids=["nan", "minus zero"])
def test_check_bits_finds_what_logits_do_not_show(
    value: bytes, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = RandomWeights(llama(**GQA))
    weights.tensors["output.weight"][-1, -1] = float("nan") if value[0] else 0.0
    write_hf(tmp_path / "hf", weights)
    real = command.convert_checkpoint

    def wrong(opened: Any, source: Path, directory: Path, *rest: Any) -> None:
        real(opened, source, directory, *rest)
        data = (directory / "model.safetensors").read_bytes()
        (directory / "model.safetensors").write_bytes(data[:-4] + value)
        renew_checksums(directory / "model.safetensors")

    assert "equal bit for bit" in succeed(call("convert", "hf", "good", "--check-bits"))
    monkeypatch.setattr(command, "convert_checkpoint", wrong)
    fail(call("convert", "hf", "out", "--check-bits"), "out: output.weight differs from the hf source", code=1)


def test_check_bits_allows_rounding_and_compares_optimizer_state(call: Call, hf: Path, tmp_path: Path) -> None:
    out = succeed(call("convert", "hf", "half", "--dtype", "bf16", "--check-bits"))
    assert "all 39 tensors are equal bit for bit after rounding" in out
    sections = {"checkpoint": {"every": 1, "export_hf": False}, "log": {"directory": str(tmp_path)}}
    Trainer(configs.tiny_config("gpt", train={"steps": 1}, **sections)).run()
    out = succeed(call("convert", "run", "other", "--to", "native", "--layout", "tp=2", "--check-bits"))
    assert "equal bit for bit" in out


@pytest.mark.parametrize("form", ["hf", "nxd", "native", "dcp"])
def test_a_dry_run_writes_nothing(form: str, call: Call, hf: Path, tmp_path: Path) -> None:
    out = succeed(call("convert", "hf", "new/out", "--to", form, "--dry-run"))
    assert re.search(r"^hf: a Hugging Face directory, llama with [\d,]+ weights$", out, re.M)
    assert re.search(r"^new/out: would be an? .*, [\d.]+ KiB; nothing is written$", out, re.M)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_conversion_that_does_not_fit_the_disk_is_refused_first(
    call: Call, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    for option in ([], ["--dry-run"]):
        fail(call("convert", "hf", "out", *option), r"out: needs .* [KM]iB, but only 1,000 B are free in ")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


# Links


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_link_out_of_the_source_is_refused(name: str, call: Call, hf: Path, tmp_path: Path) -> None:
    """A checkpoint from elsewhere must not make its converter copy a secret into the output."""
    (tmp_path / "secret").write_text("{}")
    (hf / name).unlink(missing_ok=True)
    (hf / name).symlink_to("../secret")
    fail(call("convert", "hf", "out"), rf".*/hf/{name}: a link to .*/secret, outside the checkpoint")
    fail(call("inspect", "hf"), rf".*/hf/{name}: a link to .*/secret, outside the checkpoint")
    nxd = ("--input_dir", "hf", "--output_dir", "out", "--hw_backend", "trn1", "--convert_from_full_state")
    fail(call("convert-nxd", *nxd), rf".*/hf/{name}: a link to .*/secret, outside the checkpoint")
    assert not (tmp_path / "out").exists()


def test_a_link_beside_the_source_is_refused(call: Call, hf: Path, tmp_path: Path) -> None:
    """Tokenizer files are taken from the directory above a file or a directory called model."""
    (tmp_path / "secret").write_text("{}")
    torch.save(load_file(hf / "model.safetensors"), hf / "weights.pt")
    (hf / "tokenizer.json").symlink_to("../secret")
    fail(call("convert", "hf/weights.pt", "out"), ".*hf/tokenizer.json: a link to .*/secret, outside the checkpoint")


def test_links_inside_the_source_are_followed(call: Call, hf: Path, tmp_path: Path) -> None:
    (hf / "model.safetensors").rename(hf / "data.bin.0")
    (hf / "model.safetensors").symlink_to("data.bin.0")
    (tmp_path / "latest").symlink_to("hf")
    assert "equal bit for bit" in succeed(call("convert", "latest", "out", "--check-bits"))


def test_the_hugging_face_cache_is_a_source(call: Call, hf: Path, tmp_path: Path) -> None:
    """There, every file of a model is a link to a blob."""
    root = tmp_path / "hub" / "models--a--b"
    snapshot = root / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for number, path in enumerate(sorted(hf.iterdir())):
        shutil.copy(path, root / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert "equal bit for bit" in succeed(call("convert", snapshot, "out", "--check-bits"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hf", "hf"], "hf: .*not empty"),
        (["nowhere", "out"], "nowhere: no such file or directory"),
        (["hf"], "Missing "),
        (["hf", "out", "--to", "onnx"], ".*'onnx' is not one of 'hf', 'peft', 'dcp', 'nxd', 'native'"),
        (["hf", "out", "--dtype", "int8"], ".*'int8' is not one of 'fp32', 'bf16', 'fp16'"),
        (["hf", "out", "--layout", "tp=2"], "--layout tp=2: hf takes no layout"),
        (["hf", "out", "--to", "dcp", "--layout", "tp=2"], "--layout tp=2: dcp takes names, such as names=torchtitan"),
        (["hf", "out", "--to", "dcp", "--layout", "names=x"], "--layout names=x: not one of hf, torchtitan"),
        (["hf", "hf", "--dry-run"], "hf: already exists and is not empty"),
        (["hf", "out", "--dry-run", "--to", "nxd", "--layout", "tp=7"], "tp_size=7: does not divide heads=8"),
        (["hf", "out", "--dry-run", "--to", "native", "--layout", "tp=7"], ".*nearest on 7 ranks"),
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
    for form in ("hf", "nxd", "native", "dcp"):
        fail(call("convert", "hf", "out", "--to", form), "interrupted", code=130)
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_full_disk_is_one_line(call: Call, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "out")

    monkeypatch.setattr(command.ProgressDisplay, "update", full)
    for form in ("hf", "nxd", "native", "dcp"):
        fail(call("convert", "hf", "out", "--to", form), "out: No space left on device", code=1)
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_help_names_layout_keys(call: Call) -> None:
    out = " ".join(succeed(call("convert", "--help")).split())
    for text in ("Examples:", "trainyard convert runs/my-run hf-model", "--source-layout", "kv_order (trn1, trn2)"):
        assert text in out
