"""`trainyard inspect`: what a checkpoint contains, as text and as JSON; damage and NaN are found by --check."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Call, fail, succeed
from tests.formats.test_nxd import GQA, RandomWeights, llama
from tests.support import configs
from trainyard.formats.hf import write_hf
from trainyard.run.trainer import Trainer


def test_a_run(call: Call, tmp_path: Path) -> None:
    sections = {"checkpoint": {"every": 2, "export_hf": False}, "log": {"directory": str(tmp_path)}}
    Trainer(configs.tiny_config("gpt", train={"steps": 2}, **sections)).run()
    out = succeed(call("inspect", "run", "--check"))
    checked = "run: all values are finite; all checksums agree"
    for line in (
        "run: a trainyard checkpoint",
        "  step: 2",
        "  optimizer state: yes",
        checked,
    ):
        assert f"{line}\n" in out
    facts = json.loads(succeed(call("inspect", "run", "--json", "--tensors")))
    assert (facts["step"], facts["model"]["family"], facts["layout"]["tp"]) == (2, "gpt", 1)
    assert facts["dtypes"] == {"float32": len(facts["tensors"])}
    assert facts["tensors"]["embedding.weight"] == ["float32", [facts["model"]["vocab"], facts["model"]["hidden"]]]
    shard = tmp_path / "run" / "checkpoints" / "step_00000002" / "rank_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    fail(call("inspect", "run", "--check"), ".*rank_00000.safetensors: corrupt")


@pytest.mark.parametrize("form", ["hf", "nxd", "dcp"])
def test_other_formats(form: str, call: Call, tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", RandomWeights(llama(**GQA)))
    succeed(call("convert", "hf", "out", "--to", form, "--dtype", "bf16"))
    facts = json.loads(succeed(call("inspect", "out", "--json")))
    assert (facts["format"], facts["dtypes"], facts["optimizer_state"]) == (form, {"bfloat16": 39}, False)
    assert facts["bytes"] == 2 * facts["weights"]
    out = succeed(call("inspect", "out", "--tensors"))
    assert re.search(r"^  layers\.0\.attention\.q\.weight +bfloat16  \[32, 32\]$", out, re.M)


def test_values_that_are_not_finite_are_named(call: Call, tmp_path: Path) -> None:
    weights = RandomWeights(llama(**GQA))
    weights.tensors["layers.1.mlp.up.weight"][0, 0] = float("inf")
    write_hf(tmp_path / "hf", weights)
    succeed(call("inspect", "hf"))
    message = "hf: values that are not finite in 1 tensor; the first is layers.1.mlp.up.weight"
    fail(call("inspect", "hf", "--check"), message, code=1)


def test_mistakes_are_one_line(call: Call, tmp_path: Path) -> None:
    fail(call("inspect", "nothing"), "nothing: no such file or directory")
    (tmp_path / "empty").mkdir()
    fail(call("inspect", "empty"), "empty: not a known checkpoint format")
    fail(call("inspect"), "Missing ")
