"""A family that the plan has no line for: its memory, messages and time follow from its module and its blueprint."""

from dataclasses import replace
from typing import Any, Literal

import pytest
from torch import Tensor

from tests.plan.exact_peak import exact_peak
from tests.plan.test_memory import SHAPE, TOLERANCE, allocated
from trainyard.config.load import load
from trainyard.config.model_schema import LlamaConfig
from trainyard.config.schema import Config
from trainyard.devices.cpu import CpuDevice
from trainyard.dryrun import dry_run
from trainyard.models import llama
from trainyard.models.blueprint import Blueprint, ParamSpec
from trainyard.models.factory import ModuleFactory
from trainyard.models.families import FAMILIES
from trainyard.parallel.layout import Layout
from trainyard.plan.fit_check import check_fits
from trainyard.plan.hardware.spec import parse_hardware
from trainyard.plan.report import make_plan

NORM = "layers.*.attention.{}_norm.weight"


class HeadNormConfig(LlamaConfig):
    family: Literal["head_norm"]  # type: ignore[assignment]


class HeadNormAttention(llama.LlamaAttention):
    """Llama's attention with an RMS norm of each head of queries and keys, as in Qwen 3."""

    def __init__(self, c: Any, make: ModuleFactory, name: str) -> None:
        super().__init__(c, make, name)
        self.q_norm, self.k_norm = (make.rms_norm(f"{name}.{part}_norm", c.norm_eps) for part in "qk")

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, documents_BT: Tensor | None) -> Tensor:
        (qkv,) = self.tp.column_parallel(x_BTD, *self.qkv_linears, keep_gathered=self.keep_gathered)
        q_BHTK, k_BGTK, v_BGTK = self.kernels.rope(qkv, cos_TK, sin_TK, *self.local_heads)
        q_BHTK, k_BGTK = self.q_norm(q_BHTK)[1], self.k_norm(k_BGTK)[1]
        y_BHTK = self.core_attention(q_BHTK, k_BGTK, v_BGTK, documents_BT)
        return self.tp.reduce_output(self.output(y_BHTK.transpose(1, 2).flatten(2)))


class HeadNormModel(llama.Llama):
    def __init__(self, c: Any, make: ModuleFactory) -> None:
        super().__init__(c, make)
        for index, block in self.layers.items():
            block.attention = HeadNormAttention(c, make, f"layers.{index}.attention")


def head_norm_blueprint(c: Any) -> Blueprint:
    table = llama.blueprint(c)
    norms = tuple(ParamSpec(NORM.format(part), (c.head_size,), init_value=1.0) for part in "qk")
    return replace(table, specs=(*table.specs, *norms))


@pytest.fixture(autouse=True)
def head_norm_family(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {
        "config_class": HeadNormConfig,
        "module_class": HeadNormModel,
        "blueprint": head_norm_blueprint,
    }
    monkeypatch.setitem(FAMILIES, "head_norm", replace(FAMILIES["llama"], **changes))
    monkeypatch.setattr(dry_run, "without_io", lambda config: config)  # it parses the file again


def make_config(*overrides: str) -> Config:
    config = load("tiny-llama", [*SHAPE.split(), *overrides, "data.source=synthetic", "checkpoint.every=0"])
    model = HeadNormConfig(**{**config.model.model_dump(), "family": "head_norm"})
    return config.model_copy(update={"model": model})


@pytest.mark.parametrize(
    "layout", ["layout.zero=0", "layout.tp=2 layout.sequence_parallel=true", "recompute.kind=full"]
)
def test_memory_equals_exact_peak_of_a_dry_run(layout: str) -> None:
    config = make_config(*layout.split())
    ranks = 2 if "tp" in layout else 1
    estimate = allocated(config, Layout.from_config(config, ranks), 0, "trainium")
    assert estimate == pytest.approx(exact_peak(config, 0, ranks), rel=TOLERANCE)
    plain = load("tiny-llama", [*SHAPE.split(), *layout.split()])
    if "recompute" not in layout:  # the new norms keep activations
        assert estimate > 1.02 * allocated(plain, Layout.from_config(plain, ranks), 0, "trainium")


@pytest.mark.parametrize("hardware", ["trn1.32xlarge:1", "h200:2"])
def test_a_plan_has_time_and_messages(hardware: str) -> None:
    config, plain = make_config("layout.tp=2"), load("tiny-llama", [*SHAPE.split(), "layout.tp=2"])
    sizes = {"train": config.train.model_copy(update={"global_batch": 256})}
    plans = [make_plan(c.model_copy(update=sizes), parse_hardware(hardware)) for c in (config, plain)]
    assert plans[0].traffic["tp"].messages == plans[1].traffic["tp"].messages > 0
    assert plans[0].step_time.components["memory"] > plans[1].step_time.components["memory"]
    assert plans[0].step_time.components["matmul"] == plans[1].step_time.components["matmul"]


def test_a_run_is_checked_before_it_starts() -> None:
    config = make_config()
    check_fits(config, Layout.from_config(config, 1), CpuDevice(), lambda line: None)
