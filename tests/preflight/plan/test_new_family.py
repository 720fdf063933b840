"""Families that the plan has no line for: their memory, messages and time follow from module and blueprint."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from tests.preflight.plan.exact_peak import exact_peak
from tests.preflight.plan.test_memory import SHAPE, TOLERANCE, allocated
from trainyard.config.load import load
from trainyard.config.schema import Config
from trainyard.devices import DEVICES
from trainyard.devices.builtin.neuron import DEVICE as TRAINIUM
from trainyard.devices.cpu import CpuDevice
from trainyard.families import Blueprint, ParamSpec, find_family
from trainyard.families.builtin.llama import LlamaConfig
from trainyard.models import llama
from trainyard.models.module_factory import ModuleFactory
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.hardware.spec import parse_hardware
from trainyard.preflight.plan.memory.pass_memory import _split_into_patterns
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.problems import check_fits
from trainyard.preflight.plan.report import make_plan
from trainyard.preflight.plan.time.step_time import layer_time, local_weight_count, micro_batch_time

NORM = "layers.*.attention.{}_head_norm.weight"
FAMILY = "head_norm_family:FAMILY"


class HeadNormAttention(llama.LlamaAttention):
    """Llama's attention with an RMS norm of each head of queries and keys after RoPE."""

    def __init__(self, c: Any, make: ModuleFactory, name: str) -> None:
        super().__init__(c, make, name)
        self.q_head_norm, self.k_head_norm = (make.rms_norm(f"{name}.{part}_head_norm", c.norm_eps) for part in "qk")

    def forward(self, x_BTD: Tensor, positions: Any, documents_BT: Tensor | None) -> Tensor:
        ((cos_TK, sin_TK, _),) = positions
        (qkv,) = self.tp.column_parallel(x_BTD, *self.qkv_linears, keep_gathered=self.keep_gathered)
        q_BHTK, k_BGTK, v_BGTK = self.kernels.rope(qkv, cos_TK, sin_TK, *self.local_heads)
        q_BHTK, k_BGTK = self.q_head_norm(q_BHTK)[1], self.k_head_norm(k_BGTK)[1]
        y_BHTK = self.core_attention(q_BHTK, k_BGTK, v_BGTK, documents_BT)
        return self.tp.reduce_output(self.output(y_BHTK.transpose(1, 2).flatten(2)))


class HeadNormModel(llama.Llama):
    def __init__(self, c: Any, make: ModuleFactory) -> None:
        super().__init__(c, make)
        for index, block in self.layers.items():
            block.attention = HeadNormAttention(c, make, f"layers.{index}.attention")


def head_norm_blueprint(c: Any) -> Blueprint:
    table = find_family("llama").blueprint(c)
    norms = tuple(ParamSpec(NORM.format(x), (c.head_size,), init_value=1.0, tp_gradient="partial") for x in "qk")
    return replace(table, specs=(*table.specs, *norms))


@pytest.fixture(autouse=True)
def head_norm_family(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("head_norm_family")
    module.FAMILY = replace(  # type: ignore[attr-defined]
        find_family("llama"), config_class=LlamaConfig, module=HeadNormModel, blueprint=head_norm_blueprint
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield
    find_family.cache_clear()


def make_config(*overrides: str) -> Config:
    keys = [f"model.family={FAMILY}", "data.source=synthetic", "checkpoint.every=0"]
    return load("tiny-llama", [*SHAPE.split(), *overrides, *keys])


@pytest.mark.parametrize(
    "layout", ["layout.zero=0", "layout.tp=2 layout.sequence_parallel=true", "recompute.kind=full"]
)
def test_memory_equals_exact_peak_of_a_dry_run(layout: str) -> None:
    config = make_config(*layout.split())
    ranks = 2 if "tp" in layout else 1
    estimate = allocated(config, Layout.from_config(config, ranks), 0, TRAINIUM)
    assert estimate == pytest.approx(exact_peak(config, 0, ranks), rel=TOLERANCE)
    plain = load("tiny-llama", [*SHAPE.split(), *layout.split()])
    if "recompute" not in layout:  # the new norms keep activations
        assert estimate > 1.02 * allocated(plain, Layout.from_config(plain, ranks), 0, TRAINIUM)


@pytest.mark.parametrize("hardware", ["trn1.32xlarge:1", "h200:2"])
def test_a_plan_has_time_and_messages(hardware: str) -> None:
    config, plain = make_config("layout.tp=2"), load("tiny-llama", [*SHAPE.split(), "layout.tp=2"])
    sizes = {"train": config.train.model_copy(update={"global_batch": 256})}
    plans = [make_plan(c.model_copy(update=sizes), parse_hardware(hardware)) for c in (config, plain)]
    assert plans[0].traffic["tp"].messages == plans[1].traffic["tp"].messages + 1  # gradients of the norms are summed
    assert plans[0].step_time.components["memory"] > plans[1].step_time.components["memory"]
    assert plans[0].step_time.components["matmul"] == plans[1].step_time.components["matmul"]


def test_a_run_is_checked_before_it_starts() -> None:
    config = make_config()
    check_fits(config, Layout.from_config(config, 1), CpuDevice(), lambda line: None)


TWO_KINDS = (
    "model.family=tests.support.two_kinds:FAMILY model.experts=4 model.top_k=2 model.dense_ffn=1408 model.window=512 "
    "data.source=synthetic checkpoint.every=0"
)
PIPELINE = "layout.pp=2 train.micro_batch=4"


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, "model.layers=9"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (2, f"model.layers=7 {PIPELINE} layout.pipeline_cuts=[0]"),
                (2, f"model.layers=8 {PIPELINE}"),
                (2, "model.layers=6 layout.tp=2 layout.sequence_parallel=true"),
                (2, "model.layers=6 layout.zero=1"),
                (1, "model.layers=6 recompute.kind=full"),
            )
        ),
    ],
)
def test_memory_of_layers_of_several_kinds_equals_exact_peak(ranks: int, layout: str) -> None:
    """Dense layers, then layers with experts, with and without a window in turn: a few of them are traced."""
    config = load("tiny-llama", [*SHAPE.split(), *TWO_KINDS.split(), *layout.split()])
    sizes = Layout.from_config(config, ranks)
    for pp in range(sizes.pp):
        estimate = allocated(config, sizes, pp, TRAINIUM)
        assert estimate == pytest.approx(exact_peak(config, pp, ranks), rel=0.01)


def test_a_plan_sums_over_the_kinds_of_layers() -> None:
    """Time and weights of a model are those of its layers, one after the other."""
    config = load("tiny-llama", [*SHAPE.split(), *TWO_KINDS.split(), "model.layers=12"])
    shallow = load("tiny-llama", [*SHAPE.split(), *TWO_KINDS.split(), "model.layers=4"])
    layout, hardware = Layout.from_config(config, 1), parse_hardware("h200:1")
    run = PlannedRun(config, layout, DEVICES.find("cuda"))
    assert run.alike == (0, 1, *(2, 3) * 5)
    dense, dense_window, experts, experts_window = (layer_time(run, hardware, layer) for layer in range(4))
    assert experts.matmul > dense.matmul == dense_window.matmul
    assert experts.attention == dense.attention > dense_window.attention == experts_window.attention
    shallow_run = PlannedRun(shallow, Layout.from_config(shallow, 1), DEVICES.find("cuda"))
    deep, few = (micro_batch_time(each, 0, hardware) for each in (run, shallow_run))
    assert deep.matmul - few.matmul == pytest.approx(8 * experts.matmul, rel=1e-9)
    assert deep.attention - few.attention == pytest.approx(4 * (experts.attention + experts_window.attention), rel=1e-9)
    blueprint = find_family(config.model.family).blueprint(config.model)
    assert local_weight_count(config.model, layout, 0) == blueprint.parameter_count()


def test_patterns_of_kinds_are_found() -> None:
    """Patterns by place of the first layer, length of the pattern and number of its repetitions."""

    def patterns(kinds: str) -> list[tuple[int, int, int]]:
        found = _split_into_patterns([ord(kind) for kind in kinds])
        return [(pattern.start, pattern.length, pattern.repeats) for pattern in found]

    assert patterns("AAAAAAA") == [(0, 1, 7)]
    assert patterns("A") == [(0, 1, 1)]
    assert patterns("AABBBBA") == [(0, 1, 2), (2, 1, 4), (6, 1, 1)]
    assert patterns("DDEEEE") == [(0, 1, 2), (2, 1, 4)]
    assert patterns("DEFGFGFG") == [(0, 1, 1), (1, 1, 1), (2, 2, 3)]
    assert patterns("LLLLLG" * 4 + "LL") == [(0, 6, 4), (24, 1, 2)]
