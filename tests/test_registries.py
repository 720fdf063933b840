"""One of each thing that one may add, from an installed package: an update rule, a loss, a data source, a wrapper
around linear layers, a logger, a device, a command and hardware. They train, plan, resume and inspect without a line
about them in the package."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import configs
from trainyard import Config, Trainer, devices
from trainyard.config.load import parse
from trainyard.config.registries import SOURCES, UPDATE_RULES
from trainyard.core.errors import UserError
from trainyard.core.registry import Registry
from trainyard.families import blueprint_of, family_of
from trainyard.families.family import LOSSES
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.hardware.spec import parse_hardware, read_catalog
from trainyard.preflight.plan.memory.optimizer_state import OptimizerMemory
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.problems import find_problems
from trainyard.preflight.plan.report import make_plan
from trainyard.preflight.plan.time.comm_volume import step_messages
from trainyard.prepare.inspect import InspectOptions, inspect_path

ENTRY_POINTS = """
[trainyard.optimizers]
lion = parts:Lion
plain = parts:Plain
[trainyard.losses]
smooth = parts:SmoothLoss
[trainyard.objectives]
likelier = parts:Likelier
[trainyard.data_sources]
counts = parts:COUNTS
[trainyard.loggers]
notebook = parts:Notebook
[trainyard.linear_wrappers]
scale = tests.support.scaled_linear:WRAPPER
[trainyard.devices]
abacus = parts:ABACUS
[trainyard.commands]
greet = greeting:greet
"""
PARTS = '''
import os
from contextlib import contextmanager

import numpy as np
import torch
from pydantic import Field

from trainyard import DataSource, DeviceKind, Logger, Loss, PairLoss, UpdateRule
from trainyard.core.section import Section
from trainyard.devices.cpu import CpuDevice
from trainyard.prepare.inspect import InspectReport
from trainyard.train.loss import count_labels


class LionKeys(Section):
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)


class Lion(UpdateRule):
    state_names = ("exp_avg",)
    keys = LionKeys

    def __init__(self, **keys):
        self.options = LionKeys(**keys)

    def update(self, weight, gradient, state, lr, weight_decay, updates):
        exp_avg = state["exp_avg"]
        direction = exp_avg.lerp(gradient, 1 - self.options.beta1).sign()
        return weight - lr * (direction + weight_decay * weight), {"exp_avg": exp_avg.lerp(gradient, 0.01)}


class Plain(UpdateRule):
    """SGD over the flat state itself."""

    implementation = "parts:PlainUpdate"
    norms_per_parameter = 2

    def workspace_bytes(self, shape):
        return 1000


class PlainUpdate:
    def __init__(self, rule, context):
        self.context = context

    def update(self, scalars):
        state = self.context.state
        for name in state.names:
            old = state.shard_view(state.master_weights, name)
            gradient = state.shard_view(state.reduced_grads, name).float() * scalars.grad_scale
            self.context.store_weights(name, torch.where(scalars.finite, old - scalars.lr * gradient, old), scalars)
        if state.copies_weights:
            state.weights.copy_(state.master_weights)


class SmoothLoss(Loss):
    term_names = ("smooth", "extra")
    is_causal = True

    def label_counts(self, batch):
        return [count_labels(batch["labels"])] * 2

    def terms(self, output, batch):
        total, count = self.head_loss(output, batch["labels"]), count_labels(batch["labels"])
        return {"smooth": (total, count), "extra": (0 * total, count)}


class Likelier(PairLoss):
    defaults = {"beta": 0.5}

    def pair_losses(self, scores):
        return self.options["beta"] * (scores.rejected - scores.chosen)


class Numbers:
    def __init__(self, paths, seq_len):
        self.numbers, self.seq_len = np.concatenate([np.load(path) for path in paths]), seq_len

    def __len__(self):
        return (len(self.numbers) - 1) // self.seq_len

    def samples(self, indices):
        rows = np.stack([self.numbers[i * self.seq_len : (i + 1) * self.seq_len + 1] for i in indices]).astype("i4")
        return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


class Counts(DataSource):
    """Tokens in a .npy file."""

    is_countable = True
    inspector = "parts:inspect_numbers"

    def open(self, config, paths, remote):
        return Numbers(paths, config.data.seq_len), None

    def vocab_size(self, data, remote):
        return int(max(np.load(path).max() for path in data.paths)) + 1

    def recognizes(self, path):
        return path.suffix == ".npy"


def inspect_numbers(path, options, on_progress):
    return InspectReport(str(path), "numbers", {"tokens": len(np.load(path))}, {}, [])


COUNTS = Counts()


class Notebook(Logger):
    def start(self, run):
        self.file = run.directory / "notebook.txt"

    def log(self, step, record):
        with self.file.open("a") as file:
            file.write(f"{step}\\n")


ABACUS = DeviceKind(
    module="parts:AbacusDevice",
    max_logits_bytes=1 << 25,
    label="an abacus",
    aliases=("beads",),
    attention_kernels=("wire",),
    decomposes_attention=True,
    has_grouped_gemm=False,
    fragmentation=0.5,
)


class AbacusDevice(CpuDevice):
    kind = ABACUS
    attention = []

    @classmethod
    def unavailable_reason(cls):
        return None if "ABACUS" in os.environ else "no abacus on this table"

    def describe(self):
        return "abacus, 10 rows"

    @contextmanager
    def sdpa_priority(self, preferred="auto"):
        self.attention.append(preferred)
        yield
'''
GREETING = '''
from typing import Annotated

from typer import Option


def greet(name: Annotated[str, Option(help="Whom.")] = "you") -> None:
    """Greet someone.

    Example:

      trainyard greet --name Ada
    """
    print(f"hello {name}")
'''


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of installed packages, which is the current one."""
    packages = tmp_path / "packages"
    metadata = packages / "parts-1.0.dist-info"
    metadata.mkdir(parents=True)
    (packages / "parts.py").write_text(PARTS)
    (packages / "greeting.py").write_text(GREETING)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: parts\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    monkeypatch.chdir(tmp_path)
    return packages


def small(*overrides: str) -> Config:
    return parse(configs.tiny_config().model_dump(mode="json"), ["data.source=text", *overrides])


def train(config: Config) -> list[float]:
    """The losses of a run."""
    lines = (Trainer(config).run().directory / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for line in lines if "loss" in (record := json.loads(line))]


def test_update_rule_trains_and_resumes(tmp_path: Path) -> None:
    keys = ("optimizer.kind=lion", "optimizer.lr=1e-3", "optimizer.options.beta1=0.8", "schedule.kind=constant")
    whole = train(small(*keys, "checkpoint.every=2", "log.name=whole"))
    assert whole[-1] < whole[0]
    (checkpoint,) = tmp_path.glob("runs/whole/**/*2/")
    resumed = small(*keys, f"checkpoint.resume={checkpoint}", "log.name=resumed")
    assert list(Trainer(resumed).optimizer.state.saved_buffers()) == ["weights", "first"]
    assert train(resumed) == whole[2:]


def test_update_rule_is_planned() -> None:
    def memory(kind: str) -> OptimizerMemory:
        config = small(f"optimizer.kind={kind}")
        layout = Layout.from_config(config, 1)
        return OptimizerMemory(PlannedRun(config, layout, devices.DEVICES.find("cpu")), layout.stages_on(0))

    adamw, lion, plain = memory("adamw"), memory("lion"), memory("plain")
    assert adamw.resident.optimizer - lion.resident.optimizer == 4 * adamw.flat.shard_size
    assert lion.resident.optimizer - plain.resident.optimizer == 4 * adamw.flat.shard_size
    config = small("optimizer.kind=plain", "layout.tp=2")
    run = PlannedRun(config, Layout.from_config(config, 2), devices.DEVICES.find("cpu"))
    norms = [m for m in step_messages(run, 0).items() if m[0].group == "tp"]
    assert 2 in [count for message, count in norms if message.kind == "all_reduce"]


def test_update_rule_over_the_flat_state_trains_as_torch() -> None:
    trainer = Trainer(
        small(
            "optimizer.kind=plain",
            "optimizer.lr=0.1",
            "optimizer.max_grad_norm=0",
            "train.steps=1",
            "schedule.kind=constant",
        )
    )
    parameters = {name: trainer.model.get_parameter(name) for name in trainer.optimizer.state.names}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    trainer.run()
    state = trainer.optimizer.state
    for name, parameter in parameters.items():
        gradient = state.shard_view(state.gradients, name)
        assert torch.allclose(parameter, before[name] - 0.1 * gradient, atol=1e-7)
        assert gradient.any()


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (("optimizer.kind=lyon",), "not one of adamw, lamb, muon, lion, plain, or module:Class; nearest: lion"),
        (("optimizer.kind=lion", "optimizer.options.beta3=1"), r"optimizer.options.beta3=1: .*known: beta1, beta2"),
        (("data.source=count",), "nearest: counts"),
        (("data.source=counts",), "paths: missing; data.source=counts reads files"),
        (("log.loggers=notebok",), "nearest: notebook"),
        (("train.loss=smoth",), "nearest: smooth"),
        (("train.objective=likeliest",), "nearest: likelier"),
        (("device.name=abacos",), "not one of auto, cuda, neuron, xla, cpu, abacus, or module:NAME; nearest: abacus"),
        (("device.name=Beads",), "nearest: abacus"),
        (("device.name=abacus",), "device.name=abacus: no abacus on this table; available: cpu, auto"),
        (("device.attention=wires",), "not one of auto, cudnn, flash, efficient, math, wire; nearest: wire"),
    ],
)
def test_mistakes_name_the_nearest(overrides: tuple[str, ...], error: str) -> None:
    with pytest.raises(UserError, match=error):
        Trainer(small(*overrides))


def test_loss_trains_with_its_terms_and_is_planned() -> None:
    config = small("train.loss=smooth", "log.name=smooth")
    assert train(config) == train(small("log.name=plain"))
    record = json.loads((Path("runs/smooth/metrics.jsonl")).read_text().splitlines()[0])
    assert record["loss/smooth"] == record["loss"]
    config = small("train.loss=smooth")
    messages = step_messages(PlannedRun(config, Layout.from_config(config, 2), devices.DEVICES.find("cpu")), 0)
    assert any(message.nbytes == 2 * 4 and message.group == "dp_cp" for message in messages)  # two counts
    assert train(small("train.loss=parts:SmoothLoss", "log.name=path")) == train(small("log.name=again"))


def test_objective_trains_by_name_and_by_path() -> None:
    keys = ("data.source=preference", "data.seq_len=1024", "model.max_positions=512", "train.steps=2")
    named = train(small(*keys, "train.objective=likelier", "log.name=named"))
    assert named == train(small(*keys, "train.objective=parts:Likelier", "log.name=path"))
    assert named != train(small(*keys, "train.objective=likelier", "preference.beta=2", "log.name=other"))
    with pytest.raises(UserError, match=r"preference.margin=1.0: train.objective has only beta; nearest: null"):
        small(*keys, "train.objective=likelier", "preference.margin=1")


def test_linear_wrapper_trains_resumes_and_is_counted(tmp_path: Path) -> None:
    keys = ("model.linear.scale.start=0.9", "model.linear.scale.attention=false", "model.fuse_gate_up=true")
    config = small(*keys, "checkpoint.every=2", "log.name=whole")
    trainer = Trainer(config)
    names = [name for name, _ in trainer.model.named_parameters() if name.endswith("scale")]
    assert [name for name in names if ".0." in name] == ["layers.0.mlp.gate_up.scale", "layers.0.mlp.down.scale"]
    model, added = config.model, config.model.layers * (2 * config.model.ffn_size + config.model.hidden)
    assert blueprint_of(model).parameter_count() == family_of(model).blueprint(model).parameter_count() + added
    run = PlannedRun(config, trainer.layout, devices.DEVICES.find("cpu"))
    planned, laid_out = OptimizerMemory(run, trainer.layout.stages_on(0)).flat, trainer.optimizer.state.flat
    assert (planned.spans, planned.size) == (laid_out.spans, laid_out.size)
    summary = trainer.run()
    trained = dict(trainer.model.named_parameters())
    assert all(not torch.equal(trained[name], torch.full_like(trained[name], 0.9)) for name in names)
    (checkpoint,) = tmp_path.glob("runs/whole/**/*2/")
    whole = [json.loads(line) for line in (summary.directory / "metrics.jsonl").read_text().splitlines()]
    resumed = train(small(*keys, f"checkpoint.resume={checkpoint}", "log.name=resumed"))
    assert resumed == [record["loss"] for record in whole if "loss" in record][2:]
    with pytest.raises(UserError, match=r"model.linear.scale.start=None: the checkpoint .* has 0.9"):
        Trainer(small(f"checkpoint.resume={checkpoint}", "log.name=without"))


def test_mistakes_in_a_linear_wrapper_name_the_key() -> None:
    for keys, message in (
        ("model.linear.scale.strt=1", "model.linear.scale.strt=1: unknown key; nearest: model.linear.scale.start"),
        ("model.linear.scale.start=x", "model.linear.scale.start=x: not a number; nearest: 0.5"),
        ("model.linear.scael.start=1", "model.linear.scael: not one of lora, scale, or module:NAME; nearest: scale"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            small(keys)


def test_data_source_trains_is_counted_and_inspected(tmp_path: Path) -> None:
    path = tmp_path / "numbers.npy"
    np.save(path, np.tile(np.arange(100), 100))
    keys = ("data.source=counts", f"data.paths={path}", "data.seq_len=64", "train.steps=8")
    found = train(small(*keys))
    assert found[-1] < found[0]
    assert train(small(*keys, "data.source=parts:COUNTS", "log.name=path")) == found
    report = inspect_path(path, InspectOptions(False, 0, None, None, "text"), lambda done, total: None)
    assert report.facts == {"tokens": 10_000}
    assert SOURCES.find("counts").vocab_size(small(*keys).data, None) == 100


def test_logger_logs(tmp_path: Path) -> None:
    train(small("log.loggers=notebook"))
    (written,) = tmp_path.glob("runs/*/notebook.txt")
    assert written.read_text().split() == ["1", "2", "3", "4"]


def test_command_runs(installed: Path) -> None:
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{installed}:{root}"}

    def call(*arguments: str) -> str:
        command = [sys.executable, "-m", "trainyard", "greet", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert call("--name", "Ada") == "hello Ada\n"
    assert "trainyard greet --name Ada" in call("--help")


def test_hardware_is_one_entry(tmp_path: Path) -> None:
    path = tmp_path / "hardware.yaml"
    path.write_text("b200: {like: h200, bf16_flops: 2.25e+15, memory: 200000000000}\n")
    hardware = parse_hardware("b200:16", read_catalog(path))
    assert (hardware.ranks, hardware.entry.bf16_flops) == (16, 2.25e15)


def test_device_trains_resumes_and_is_preferred_to_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.select("auto").describe().startswith("CPU")
    monkeypatch.setenv("ABACUS", "10 rows")
    assert devices.select("auto").describe() == "abacus, 10 rows"
    keys = ("device.name=abacus", "device.attention=wire", "schedule.kind=constant")
    whole = train(small(*keys, "checkpoint.every=2", "log.name=whole"))
    assert whole == train(small("schedule.kind=constant", "log.name=cpu"))
    record = json.loads(Path("runs/whole/metrics.jsonl").read_text().splitlines()[0])
    assert record["device"] == "abacus, 10 rows"
    assert set(type(devices.select("abacus")).attention) == {"wire"}  # type: ignore[attr-defined]
    (checkpoint,) = tmp_path.glob("runs/whole/**/*2/")
    assert train(small(*keys, f"checkpoint.resume={checkpoint}", "log.name=resumed")) == whole[2:]
    path = ("device.name=parts:ABACUS", "device.attention=rod", "schedule.kind=constant", "log.name=path")
    assert train(small(*path)) == whole


def test_device_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "hardware.yaml"
    path.write_text("table: {like: h200, kind: abacus}\nother: {like: h200, kind: cpu}\n")
    catalog = read_catalog(path)
    config = small("layout.cp=2", "layout.cp_method=ring", f"checkpoint.directory={tmp_path}")
    abacus, cpu = (make_plan(config, parse_hardware(f"{name}:2", catalog)) for name in ("table", "other"))
    memory = abacus.memory_by_pp[0]
    assert memory.fragmentation == (memory.total - memory.fragmentation) // 2
    assert cpu.memory_by_pp[0].fragmentation == 0
    assert abacus.step_time.components["matmul"] == pytest.approx(0.8 * cpu.step_time.components["matmul"])
    assert (abacus.config.layout.cp_method, cpu.config.layout.cp_method) == ("all_gather", "ring")
    assert "an abacus gathers keys and values instead" in find_problems(abacus, [])[0].message
    path.write_text("table: {like: h200, kind: abakus}\n")
    with pytest.raises(UserError, match=r"hardware.yaml: table.kind=abakus: not one of .*; nearest: abacus"):
        read_catalog(path)


@pytest.mark.parametrize("registry", [LOSSES, SOURCES, UPDATE_RULES, devices.DEVICES])
def test_objects_of_another_class_are_refused(registry: Registry[object]) -> None:
    with pytest.raises(UserError, match=f"{registry.key}=parts:inspect_numbers: expected .* found a function"):
        registry.find("parts:inspect_numbers")
