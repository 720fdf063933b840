"""A training step on XLA equals the eager step and compiles once."""

import pytest

from tests.support import configs
from tests.xla import steps
from tests.xla.conftest import RunIsolated

RECOMPUTE = {"kind": "selective", "modules": ["core_attention", "mlp"]}
BATCH = 4


@pytest.mark.parametrize(("ffn", "micro_batch", "graphs"), [(48, 4, 2), (64, 1, 3)], ids=["one micro batch", "four"])
def test_step_equals_eager(ffn: int, micro_batch: int, graphs: int, run_isolated: RunIsolated) -> None:
    """Two graphs: forward with backward, and the update. Later micro batches share a third. (The models differ, so that
    one test does not reuse graphs of another.)"""
    train = {"global_batch": BATCH, "micro_batch": micro_batch}
    difference = run_isolated(
        steps.compare_one_device, {**configs.LLAMA, "ffn": ffn}, {"train": train, "recompute": RECOMPUTE}
    )
    assert difference.losses < 1e-5
    assert difference.norms < 1e-5
    assert difference.weights < 1e-5
    assert difference.graphs == [graphs] * steps.STEPS
    assert not difference.fallbacks


def test_random_numbers_are_equal(run_isolated: RunIsolated) -> None:
    """Initial weights, dropout and rounding use integer arithmetic only, which is exact with any compiler."""
    assert run_isolated(steps.random_numbers_differ) == []
