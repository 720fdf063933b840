"""Advantages, loss and gradients of GRPO and RLOO are those of TRL, for the same completions. `bench/policy_parity.py`
ran TRL, whose values are in data/trl_policy.json."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
VALUES: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "trl_policy.json").read_text())


@pytest.fixture(scope="module")
def parity() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        return runpy.run_path(str(BENCH / "policy_parity.py"))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, parity: dict[str, Any]) -> Path:
    directory = tmp_path_factory.mktemp("trl")
    parity["write_model"](directory / "model")
    return directory


@pytest.mark.parametrize("name", VALUES)
def test_advantages_loss_and_gradients_are_those_of_trl(name: str, work: Path, parity: dict[str, Any]) -> None:
    expected = VALUES[name]
    loss, advantages, gradients = parity["train_ours"](work, name, expected)
    assert advantages == pytest.approx(expected["advantages"], abs=1e-6)
    assert loss == pytest.approx(expected["loss"], abs=2e-6)
    found = parity["summary"](gradients)
    assert found.keys() == expected["gradients"].keys()
    for key, (norm, product) in expected["gradients"].items():
        assert found[key] == pytest.approx([norm, product], abs=1e-5 * norm), key


def test_stale_log_probabilities_are_found(work: Path, parity: dict[str, Any]) -> None:
    """Those of another completion of the same length, as of an earlier batch of rollouts."""
    name = "GRPO, tokens"
    shifted = VALUES[name] | {"old": VALUES[name]["old"][1:] + VALUES[name]["old"][:1]}
    loss, _, _ = parity["train_ours"](work, name, shifted)
    assert abs(loss - VALUES[name]["loss"]) > 1e-3
