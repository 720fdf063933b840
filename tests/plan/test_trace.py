"""The trace of a stage depends on nothing but the stage: not on the checkpoint function, nor on what was imported."""

import subprocess
import sys
from typing import Any

import pytest
from torch.utils.checkpoint import checkpoint

from tests.support import configs
from trainyard.parallel.layout import Layout
from trainyard.plan.memory.device_kinds import DEVICE_KINDS
from trainyard.plan.memory.local_sizes import RankSizes
from trainyard.plan.trace import memory_trace, stage_run

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


@pytest.mark.parametrize("case", CASES)
def test_equals_torchs_checkpoint(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout, recompute = CASES[case]
    config = configs.tiny_config(model, layout=layout, recompute=recompute)
    sizes = RankSizes(config, Layout.from_config(config, 2), DEVICE_KINDS["gpu"])
    stage = sizes.traced_stage(2, range(0), is_first=True, is_last=True)
    trace = memory_trace.trace_memory.__wrapped__
    planned = trace(stage)
    monkeypatch.setattr(stage_run, "eager_checkpoint", checkpoint)
    assert planned == trace(stage)


def test_needs_no_compiler_and_does_not_change_with_it() -> None:
    """torch's compiler takes two seconds to import, and registers rules of its own for tensors without memory."""
    script = """
import sys
from trainyard.config.load import load
from trainyard.parallel.layout import Layout
from trainyard.plan.memory.peak import estimate_memory
from trainyard.plan.trace.memory_trace import trace_memory
config = load("recipes/llama3-70b.yaml", [])
first = estimate_memory(config, Layout.from_config(config, 512), 0, "trainium")
assert "torch._dynamo" not in sys.modules
import torch._dynamo
trace_memory.cache_clear()
assert first == estimate_memory(config, Layout.from_config(config, 512), 0, "trainium")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
