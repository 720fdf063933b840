"""Properties of a predicted step that hold for any constants."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from trainyard.config.load import load
from trainyard.devices import DEVICES
from trainyard.devices.kind import Efficiency
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.hardware.spec import Hardware, parse_hardware
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.time.comm_volume import Message
from trainyard.preflight.plan.time.step_time import StepTime, message_time, predict_step

HARDWARE = parse_hardware("trn1.32xlarge:16")
LAYOUTS = {
    "tp 32": [],
    "tp 8": ["layout.tp=8"],
    "no pipeline": ["layout.tp=32", "layout.pp=1"],
    "context": ["layout.cp=2"],
    "zero 3": ["layout.pp=1", "layout.zero=3"],
}


def predicted(*overrides: str, efficiency: Efficiency | None = None) -> StepTime:
    config = load("llama3-70b", overrides)
    layout = Layout.from_config(config, HARDWARE.ranks)
    run = PlannedRun(config, layout, DEVICES.find("neuron"))
    return predict_step(run, HARDWARE, efficiency or HARDWARE.entry.kind.efficiency)


def seconds(*overrides: str, efficiency: Efficiency | None = None) -> float:
    return predicted(*overrides, efficiency=efficiency).seconds


@pytest.mark.parametrize("overrides", LAYOUTS.values(), ids=LAYOUTS)
@given(st.sampled_from(Efficiency._fields), st.floats(0.1, 0.9))
@examples(20)
def test_higher_efficiency_never_makes_a_step_longer(overrides: list[str], resource: str, value: float) -> None:
    worse, better = (HARDWARE.entry.kind.efficiency._replace(**{resource: share}) for share in (value, 1.0))
    assert seconds(*overrides, efficiency=better) <= seconds(*overrides, efficiency=worse) * (1 + 1e-9)


def test_twice_the_batch_takes_less_than_twice_the_time() -> None:
    once, twice = seconds(), seconds("train.global_batch=2048")
    assert once < twice < 2 * once


def test_recompute_costs_time() -> None:
    kinds = [seconds(f"recompute.kind={kind}", "recompute.modules=[]") for kind in ("none", "attention", "full")]
    assert kinds == sorted(kinds)
    assert kinds[2] > 1.1 * kinds[0]


@pytest.mark.parametrize(("recompute", "share"), [("none", 1 / 3), ("full", 1 / 3.725)])
def test_forward_passes_before_the_step_take_time(recompute: str, share: float) -> None:
    """Of the matrix multiplications of a block, two of three are backward. Full recompute repeats the first one, except
    for the last matrix, 27.5 % of a block."""

    def predict(*overrides: str) -> StepTime:
        pairs = ["data.source=preference", "layout.pp=1", f"recompute.kind={recompute}", "recompute.modules=[]"]
        return predicted(*pairs, "layout.tp=32", *overrides)

    dpo, kto = predict("train.objective=dpo"), predict("train.objective=kto")
    # The head, 0.8 % of the work, is not computed again.
    assert kto.components["matmul"] / dpo.components["matmul"] == pytest.approx(1 + share, rel=0.002)
    assert kto.components["tp"] > 1.2 * dpo.components["tp"]
    live = predict("train.objective=dpo", "preference.reference=live")
    assert live.components["matmul"] == kto.components["matmul"]
    both = predict("train.objective=kto", "preference.reference=live")  # each prompt has two answers
    assert both.components["matmul"] / dpo.components["matmul"] == pytest.approx(1 + 3 * share, rel=0.002)


def test_virtual_stages_and_zero_bubble_schedules_shrink_the_bubble() -> None:
    def bubble(*overrides: str) -> float:
        return predicted("train.global_batch=16", *overrides).components["bubble"]

    plain = bubble()
    assert bubble("layout.vpp=2") == pytest.approx(plain / 2, rel=0.1)
    assert bubble("layout.pipeline_schedule=zero_bubble") == pytest.approx(plain / 3, rel=0.1)


def test_group_inside_an_instance_does_not_use_the_network() -> None:
    layout = Layout(tp=32, pp=2, dp=8, micro_batches=1)
    inside = message_time(Message("tp", 32, "all_gather", "bfloat16", 2**20), layout, HARDWARE)
    across = message_time(Message("dp_cp", 8, "all_gather", "bfloat16", 2**20), layout, HARDWARE)
    assert inside.network == 0 < inside.link
    assert across.link == 0 < across.network
    # Eight ranks on eight instances: all 32 ranks of an instance send at the same time and share its network.
    assert across.network == pytest.approx(2**20 * 7 / 8 * 32 / HARDWARE.entry.network_bandwidth)


def test_all_reduce_costs_a_reduce_scatter_and_an_all_gather() -> None:
    layout = Layout(tp=8, dp=64)
    parts = [
        message_time(Message("dp_cp", 64, kind, "float32", 2**20), layout, HARDWARE)
        for kind in ("reduce_scatter", "all_gather")
    ]
    whole = message_time(Message("dp_cp", 64, "all_reduce", "float32", 2**20), layout, HARDWARE)
    assert whole.network == pytest.approx(sum(part.network for part in parts))
    assert whole.link == pytest.approx(sum(part.link for part in parts))


def test_gpus_overlap_data_parallel_messages_and_trainium_does_not() -> None:
    """On GPUs gradients are reduced during the last backward pass."""
    config = load("llama2-7b", ["layout.tp=1", "layout.sequence_parallel=false", "train.global_batch=64"])
    gpus = parse_hardware("h200:8")
    layout, efficiency = Layout.from_config(config, 8), gpus.entry.kind.efficiency
    trainium = Hardware("trainium", replace(gpus.entry, kind=DEVICES.find("neuron")), 8)

    def overlapped(hardware: Hardware) -> float:
        run = PlannedRun(config, layout, hardware.entry.kind)
        return predict_step(run, hardware, efficiency).overlapped["dp"]

    assert overlapped(gpus) > 0
    assert overlapped(trainium) == 0
