"""Loss and gradients of fine-tuning are those of TRL and PEFT. `bench/trl_parity.py` ran TRL, whose values are in
data/trl.json: of each gradient its norm, and its product with a random tensor."""

import json
import runpy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

PARITY: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "trl_parity.py"))
VALUES: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "trl.json").read_text())


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the initial adapters that TRL had."""
    directory = tmp_path_factory.mktemp("trl")
    PARITY["write_models"](directory)
    for name, case in PARITY["CASES"].items():
        if "lora" in case:
            model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
            assert isinstance(
                PARITY["write_adapter"](model, directory / "adapters" / name, case["lora"]), peft.PeftModel
            )
    return directory


@pytest.mark.parametrize("name", PARITY["CASES"])
def test_loss_and_gradients_are_those_of_trl(name: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(work / "cache"))
    loss, gradients = PARITY["train_ours"](work, name)
    assert loss == pytest.approx(VALUES[name]["loss"], rel=2e-6)
    found, expected = PARITY["summary"](gradients), VALUES[name]["gradients"]
    assert found.keys() == expected.keys()
    for key, (norm, product) in expected.items():
        assert found[key] == pytest.approx([norm, product], abs=1e-5 * norm), key
