"""`device.batch_invariant` refuses in one line what it cannot keep."""

from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.configs import GPT, LLAMA, MOE, tiny_config
from trainyard.core.errors import UserError
from trainyard.devices import Device
from trainyard.devices.cpu import CpuDevice
from trainyard.inference.build_engine import check_invariance
from trainyard.kernels.batch_invariant import BatchInvariantKernels

REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "device.batch_invariant=true: a bert model does not generate; nearest: false": ("bert", {}),
    "device.batch_invariant=true: experts get the tokens of all sequences at once; nearest: false": (MOE, {}),
    "device.batch_invariant=true: adapters have matmuls of their own; nearest: false": (LLAMA, {"lora": {"rank": 4}}),
    "device.batch_invariant=true: a token's rope_scaling depends on the length of its sequence; nearest: false": (
        LLAMA | {"rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_max_positions": 32}},
        {},
    ),
    "precision.kind=fp8: not with": (LLAMA, {"precision": {"kind": "fp8"}}),
    "layout.tp=2: not with device.batch_invariant=true, sums over": (LLAMA, {"layout": {"tp": 2}}),
    "layout.cp=2: not with": (LLAMA, {"layout": {"cp": 2}}),
    "compile.enabled=true: not with": (LLAMA, {"compile": {"enabled": True}}),
    "model.attention_dropout=0.1: not with": (GPT | {"attention_dropout": 0.1}, {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    model, sections = REFUSED[message]
    tiny_config(model, **sections)
    with pytest.raises((UserError, ValidationError)) as error:
        tiny_config(model, **sections, device={"batch_invariant": True})
    assert message in str(error.value)


def test_devices() -> None:
    assert isinstance(CpuDevice().batch_invariant_kernels(), BatchInvariantKernels)
    with pytest.raises(UserError, match="has no such kernels; nearest: false"):
        Device.batch_invariant_kernels(CpuDevice())


def test_options_of_generation() -> None:
    model = tiny_config().model
    check_invariance(model, 1, compiled=False, fp8_weights=False)
    for arguments, option in (
        ((2, False, False), "--tp 2"),
        ((1, True, False), "--compile"),
        ((1, False, True), "--fp8"),
    ):
        with pytest.raises(UserError, match=f"--batch-invariant: not with {option}"):
            check_invariance(model, *arguments)
    with pytest.raises(UserError, match="--batch-invariant: experts"):
        check_invariance(tiny_config(MOE).model, 1, compiled=False, fp8_weights=False)
