"""A step through XLA is the eager step, and is compiled once."""

import pytest

from tests.support import configs
from tests.xla import steps
from tests.xla.conftest import Apart

RECOMPUTE = {"kind": "selective", "modules": ["core_attention", "mlp"]}
BATCH = 4


@pytest.mark.parametrize(("ffn", "micro_batch", "graphs"), [(48, 4, 2), (64, 1, 3)], ids=["one micro batch", "four"])
def test_a_step_is_the_eager_step(ffn: int, micro_batch: int, graphs: int, apart: Apart) -> None:
    """Two graphs: forward and backward, and the update. Where more micro batches follow the first, they share one.
    (Models differ: what one test has compiled is not counted in another.)"""
    train = {"global_batch": BATCH, "micro_batch": micro_batch}
    found = apart(steps.alone, {**configs.LLAMA, "ffn": ffn}, {"train": train, "recompute": RECOMPUTE})
    assert found.losses < 1e-5
    assert found.norms < 1e-5
    assert found.weights < 1e-5
    assert found.graphs == [graphs] * steps.STEPS
    assert not found.fallbacks


def test_random_numbers_are_the_same(apart: Apart) -> None:
    """Initial weights, dropout and rounding draw by integers alone: exact, whatever the compiler."""
    assert apart(steps.random_numbers_differ) == []
