"""Laws that a predicted step keeps, whatever the constants."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.config.load import load
from trainyard.parallel.layout import Layout
from trainyard.plan.hardware.spec import Hardware, parse_hardware
from trainyard.plan.time.comm_volume import Message
from trainyard.plan.time.efficiency import Efficiency, fitted_efficiency
from trainyard.plan.time.step_time import message_time, predict_step

ON = parse_hardware("trn1.32xlarge:16")
WORDS = {
    "tp 32": [],
    "tp 8": ["layout.tp=8"],
    "no pipeline": ["layout.tp=32", "layout.pp=1"],
    "context": ["layout.cp=2"],
    "zero 3": ["layout.pp=1", "layout.zero=3"],
}


def seconds(*words: str, on: Hardware = ON, e: Efficiency | None = None) -> float:
    config = load("llama3-70b", words)
    return predict_step(config, Layout.from_config(config, on.ranks), on, e or fitted_efficiency(on)).seconds


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@given(st.sampled_from(Efficiency._fields), st.floats(0.1, 0.9))
@settings(max_examples=5, deadline=None)
def test_nothing_done_better_makes_a_step_longer(words: list[str], what: str, value: float) -> None:
    worse, better = (fitted_efficiency(ON)._replace(**{what: each}) for each in (value, 1.0))
    assert seconds(*words, e=better) <= seconds(*words, e=worse) * (1 + 1e-9)  # it may be hidden behind another


def test_twice_the_batch_takes_less_than_twice_as_long() -> None:
    once, twice = seconds(), seconds("train.global_batch=2048")
    assert once < twice < 2 * once


def test_recompute_costs_time() -> None:
    kinds = [seconds(f"recompute.kind={kind}", "recompute.modules=[]") for kind in ("none", "attention", "full")]
    assert kinds == sorted(kinds)
    assert kinds[2] > 1.1 * kinds[0]


def test_virtual_stages_and_better_schedules_shrink_the_bubble() -> None:
    def bubble(*words: str) -> float:
        config = load("llama3-70b", ["train.global_batch=16", *words])
        return predict_step(config, Layout.from_config(config, ON.ranks), ON, fitted_efficiency(ON)).components[
            "bubble"
        ]

    plain = bubble()
    assert bubble("layout.vpp=2") == pytest.approx(plain / 2, rel=0.1)
    assert bubble("layout.pipeline_schedule=zero_bubble") == pytest.approx(plain / 3, rel=0.1)


def test_a_group_on_one_instance_never_touches_the_network() -> None:
    layout = Layout(tp=32, pp=2, dp=8, micro_batches=1)
    inside = message_time(Message("tp", 32, "all_gather", "bfloat16", 2**20), layout, ON)
    across = message_time(Message("dp_cp", 8, "all_gather", "bfloat16", 2**20), layout, ON)
    assert inside.network == 0 < inside.link
    assert across.link == 0 < across.network
    # Eight ranks, one on each instance: all 32 ranks of an instance send at once, and share its network.
    assert across.network == pytest.approx(2**20 * 7 / 8 * 32 / ON.entry.network_bandwidth)


def test_a_sum_is_a_scatter_and_a_gather() -> None:
    layout = Layout(tp=8, dp=64)
    parts = [
        message_time(Message("dp_cp", 64, kind, "float32", 2**20), layout, ON)
        for kind in ("reduce_scatter", "all_gather")
    ]
    whole = message_time(Message("dp_cp", 64, "all_reduce", "float32", 2**20), layout, ON)
    assert whole.network == pytest.approx(sum(part.network for part in parts))
    assert whole.link == pytest.approx(sum(part.link for part in parts))


def test_gpus_hide_what_trainium_shows() -> None:
    """Data-parallel sums go on beside the last backward pass."""
    config = load("llama2-7b", ["layout.tp=1", "layout.sequence_parallel=false", "train.global_batch=64"])
    on = parse_hardware("h200:8")
    found = predict_step(config, Layout.from_config(config, 8), on, fitted_efficiency(on))
    assert found.overlapped["dp"] > 0
    slow = Hardware("slow", replace(on.entry, kind="trainium"), 8)
    assert predict_step(config, Layout.from_config(config, 8), slow, fitted_efficiency(on)).overlapped["dp"] == 0
