"""The trace of a stage depends on nothing but the stage: not on the checkpoint function, nor on what was imported."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support import configs
from trainyard.devices import DEVICES
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.trace import memory_trace, stage_run
from trainyard.preflight.plan.trace.shape_rules import shape_rule

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "full": (configs.LLAMA, {}, {"kind": "full"}),
    "attention": (configs.GPT, {}, {"kind": "attention"}),
    "sequence-parallel": (
        configs.LLAMA,
        {"tp": 2, "sequence_parallel": True},
        {"kind": "selective", "modules": ["core_attention", "mlp"]},
    ),
    "experts": (configs.MOE, {"ep": 2}, {"kind": "full"}),
}


aten = torch.ops.aten
FLOATS = torch.empty(4, 8, 6, device="meta").transpose(1, 2)
INTS = torch.empty(4, 6, dtype=torch.int32, device="meta")
INDEX = torch.empty(4, dtype=torch.int64, device="meta")
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.logsumexp.default, (FLOATS, [-1]), {}),
    (aten.logsumexp.default, (FLOATS, [0, 1], True), {}),
    (aten.floor_divide.default, (INTS, 2), {}),
    (aten.topk.default, (FLOATS, 2), {}),
    (aten.topk.default, (FLOATS, 3, 0), {}),
    (aten.sort.stable, (INTS,), {"stable": True, "dim": 0}),
    (aten.cumsum.default, (INTS, 0), {}),
    (aten.cumsum.default, (INTS, 0), {"dtype": torch.int32}),
    (aten.index_copy.default, (INTS, 0, INDEX, INTS), {}),
    (aten.scatter.src, (FLOATS.contiguous(), 0, INTS.long()[..., None], FLOATS), {}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS, ids=[str(call[0]) for call in CALLS])
def test_shape_rules_equal_torchs(function: Any, args: Any, kwargs: Any) -> None:
    def described(out: Any) -> list[Any]:
        return [(x.shape, x.dtype, x.stride()) for x in (out if isinstance(out, tuple) else (out,))]

    assert described(shape_rule(function, args, kwargs)) == described(function(*args, **kwargs))


@pytest.mark.parametrize("case", CASES)
def test_equals_torchs_checkpoint(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout, recompute = CASES[case]
    config = configs.tiny_config(model, layout=layout, recompute=recompute)
    run = PlannedRun(config, Layout.from_config(config, 2), DEVICES.find("cuda"))
    stage = run.traced_stage((0, 1))
    trace = memory_trace.trace_memory.__wrapped__
    planned = trace(stage)
    monkeypatch.setattr(stage_run, "eager_checkpoint", checkpoint)
    assert planned == trace(stage)


@pytest.mark.nightly
def test_needs_no_compiler_and_does_not_change_with_it() -> None:
    """torch's compiler takes two seconds to import, and registers rules of its own for tensors without memory."""
    script = """
import sys
from trainyard.config.load import load
from trainyard.devices.builtin.neuron import DEVICE as TRAINIUM
from trainyard.parallel.layout import Layout
from trainyard.devices import DEVICES
from trainyard.preflight.plan.memory.peak import estimate_memory
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.trace.memory_trace import trace_memory
config = load("recipes/llama3-70b.yaml", [])
run = PlannedRun(config, Layout.from_config(config, 512), DEVICES.find("neuron"))
first = estimate_memory(run, 0)
assert "torch._dynamo" not in sys.modules
import torch._dynamo
trace_memory.cache_clear()
assert first == estimate_memory(run, 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
