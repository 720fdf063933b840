"""The audit: clean on all recipes, and each planted violation is found at its line."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import LLAMA, tiny_config
from trainyard.config.load import load
from trainyard.config.recipes import recipe_names
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.devices.neuron.topology import LNC_CHOICES, rank_memory_bytes
from trainyard.devices.neuron.trainium import MetaTrainium
from trainyard.parallel.layout import Layout
from trainyard.preflight.audit.audit import AuditReport, audit, trace_jobs
from trainyard.preflight.audit.rules import (
    Violation,
    check_groups,
    check_micro_batches,
    check_operators,
    merge_violations,
)
from trainyard.preflight.dryrun.dry_run import dry_run, trace_steps

ONE_LAYER = {**LLAMA, "layers": 1}
LOSS_START = """
import os
import torch

calls = []

class SortInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.sort(-1).values  # custom backward

def loss(output, batch):
    x, labels = output.hidden.float(), batch["labels"]
    calls.append(1)
"""
LOSS_END = """
    return x.sum(), (labels != -100).sum()
"""
# Lines of a loss with one violation each: the line, the rule that it breaks, and a text that the violation contains.
PLANTS = {
    "sort": ("x = x + x.sort(-1).values", "operators", "aten.sort"),
    "topk": ("x = x + x.topk(3).values.sum()", "operators", "aten.topk"),
    "fft": ("x = x + torch.fft.rfft(x).abs().sum()", "operators", "aten._fft_r2c"),
    "complex": ("x = x + torch.view_as_real(torch.complex(x, x)).sum()", "dtypes", "complex64[2, 16, 32]"),
    "float64": ("x = (x.double() * 2).float()", "dtypes", "float64[2, 16, 32]"),
    "gather": ("x = x + x.gather(2, labels.clamp(0, 31).long()[..., None])", "int64", "int64[2, 16, 1]"),
    "look-up": ("x = x + torch.ones(300, device=x.device)[labels.long()].sum()", "int64", "aten.index"),
    "cross entropy": (
        "x = x + torch.nn.functional.cross_entropy(x.flatten(0, 1), labels.clamp(0, 31).flatten().long())",
        "int64",
        "aten.nll_loss_forward",
    ),
    "backward": ("x = x + x.max(-1).values.sum()", "int64", "in the backward pass of this line, aten.scatter"),
    "mask": ("x = x + x[labels != -100].sum()", "shapes", "aten.index"),
    "nonzero": ("positions = (labels != 5).nonzero()", "shapes", "aten.nonzero"),
    "item": ("x = x * x.sum().item()", "host", "aten._local_scalar_dense"),
    "branch": ("x = x * 2 if (labels == 5).any() else x", "host", "aten._local_scalar_dense"),
    "to host": ("x = x + float(x.detach().cpu().numpy().sum())", "host", "-> host float32[2, 16, 32]"),
    "print": ("print(x)", "host", "python.print(float32[2, 16, 32])"),
    "format": ("text = f'{x.sum()}'", "host", "python.print(float32[])"),
    "rand": ("x = x + torch.rand(32, device=x.device)", "random", "aten.rand"),
    "dropout": ("x = torch.nn.functional.dropout(x, 0.1)", "random", "aten.bernoulli"),
    "noise": ("x = x + torch.randn_like(x)", "random", "aten.randn_like"),
    "equal": ("same = torch.equal(labels, labels.clone())", "host", "aten.equal"),
    "custom backward": ("x = SortInBackward.apply(x)", "operators", "in the backward pass of this line, aten.sort"),
}


def run_audit(config: Config, generation: str = "trn1") -> AuditReport:
    return audit(config, generation, LNC_CHOICES[generation][0], 1, lambda done, total: None)


def loss_source(lines: str) -> str:
    return LOSS_START + "".join(f"    {line}\n" for line in lines.splitlines()) + LOSS_END


def line_number(text: str, mark: str) -> int:
    """The line that ends in `# mark`."""
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.endswith(f"# {mark}"))


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Config, int]]:
    """Makes a configuration with the given lines in its loss; returns it and the number of the line marked `# here`."""
    monkeypatch.syspath_prepend(tmp_path)

    def plant(lines: str, **sections: dict[str, Any]) -> tuple[Config, int]:
        name, text = f"plant_{abs(hash(lines))}", loss_source(lines)
        (tmp_path / f"{name}.py").write_text(text)
        return tiny_config(ONE_LAYER, train={"loss": f"{name}:loss"}, **sections), line_number(text, "here")

    return plant


@pytest.fixture(scope="module")
def planted_violations(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Violation]]:
    """A loss with every line of PLANTS: its text and its violations."""
    directory = tmp_path_factory.mktemp("planted")
    text = loss_source("\n".join(f"{line}  # {name}" for name, (line, _, _) in PLANTS.items()))
    (directory / "all_violations.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        report = run_audit(tiny_config(ONE_LAYER, train={"loss": "all_violations:loss"}))
    return text, report.violations


@pytest.mark.parametrize("name", PLANTS)
def test_planted_violation_is_found_at_its_line(name: str, planted_violations: tuple[str, list[Violation]]) -> None:
    text, violations = planted_violations
    _, rule, expected = PLANTS[name]
    location = f"all_violations.py:{line_number(text, name)}"
    matching = [each for each in violations if each.rule == rule and each.location.split(" ")[0].endswith(location)]
    assert len(matching) == 1, "\n".join(map(str, violations))
    assert expected in matching[0].description
    assert matching[0].fix


def test_planted_lines_have_no_other_violation(planted_violations: tuple[str, list[Violation]]) -> None:
    """Except that a sum over selected elements has a shape that depends on values in backward too."""
    text, violations = planted_violations
    planted = {line_number(text, name) for name in PLANTS}
    lines = {int(each.location.split(":")[1].split(" ")[0]) for each in violations if each.rule != "recompiles"}
    assert lines <= planted


@pytest.mark.parametrize(
    ("lines", "expected"),
    [("x = x * len(calls)  # here", "aten.mul.Tensor"), ("x = x[:, : 1 + len(calls)]  # here", "aten.slice")],
    ids=["number", "shape"],
)
def test_graph_that_depends_on_the_step_is_found(
    lines: str, expected: str, plant: Callable[..., tuple[Config, int]]
) -> None:
    config, number = plant(lines)
    (violation,) = [each for each in run_audit(config).violations if each.rule == "recompiles"]
    assert f".py:{number}" in violation.location
    assert expected in violation.description


def test_clean_custom_loss_has_no_violation(plant: Callable[..., tuple[Config, int]]) -> None:
    config, _ = plant("x = torch.where(labels[..., None] == 5, x, 0.0)  # here")
    assert run_audit(config).violations == []


def test_custom_loss_of_logits_has_one_graph_for_all_ranks(plant: Callable[..., tuple[Config, int]]) -> None:
    lines = """log_p = output.logits().float().log_softmax(-1)
x = x.sum() - log_p.gather(-1, labels.clamp(min=0)[..., None])  # here"""
    config, _ = plant(lines, layout={"tp": 2, "ranks": 2, "sequence_parallel": True, "zero": 1})
    assert run_audit(config).violations == []


def test_fix_of_cross_entropy_is_a_gather(planted_violations: tuple[str, list[Violation]]) -> None:
    (fix,) = {each.fix for each in planted_violations[1] if "nll_loss" in each.description}
    assert ".gather(-1, labels" in fix


WIDER = {"hidden": 256, "ffn": 1024, "vocab": 2000}


@pytest.mark.parametrize(
    "lines",
    ['x = x * int(os.environ["RANK"])  # here', 'x = x.chunk(4, -1)[int(os.environ["RANK"])] * 2  # here'],
    ids=["constant", "slice"],
)
def test_graph_that_depends_on_the_rank_is_found(lines: str, plant: Callable[..., tuple[Config, int]]) -> None:
    config, number = plant(lines, layout={"tp": 2, "ranks": 4, "sequence_parallel": True, "zero": 1})
    assert os.environ.get("RANK") is None
    (violation,) = [each for each in run_audit(config).violations if each.rule == "ranks"]
    assert f".py:{number}" in violation.location


def test_group_of_six_ranks_is_refused() -> None:
    config = tiny_config(
        {"family": "gpt", "vocab": 260, "hidden": 48, "layers": 1, "heads": 6, "ffn": 48, "max_positions": 64},
        layout={"tp": 6, "ranks": 6},
    )
    violations = run_audit(config).violations
    assert {each.rule for each in violations} == {"groups"}
    assert any("6 ranks" in each.description and "trainyard/" in each.location for each in violations)


def test_tensor_parallel_size_that_the_chip_refuses_is_reported_before_any_trace() -> None:
    report = run_audit(tiny_config({**LLAMA, "heads": 8, "kv_heads": 8}, layout={"tp": 8, "ranks": 8}), "trn2")
    (violation,) = report.violations
    assert violation.rule == "groups"
    assert "layout.tp=8" in violation.description


def test_run_that_does_not_fit_is_reported_with_the_line_of_the_peak() -> None:
    large = load("llama2-7b", ["layout.tp=1", "layout.zero=0", "layout.ranks=1", "model.layers=4"])
    report = run_audit(large)
    (violation,) = [each for each in report.violations if each.rule == "memory"]
    assert "a rank has 16" in violation.description
    assert ".py:" in violation.location
    assert rank_memory_bytes("trn1", 1) < report.stages[0].peak_bytes < rank_memory_bytes("trn3", 2)


def test_memory_is_that_of_weights_optimizer_and_activations() -> None:
    """Between steps a rank has fp32 weights, gradients and two moments. The peak is above that and grows with the micro
    batch."""
    model = {**LLAMA, **WIDER, "layers": 2}
    base: dict[str, Any] = {"data": {"seq_len": 64}, "precision": {"kind": "fp32"}}
    small, large = (
        run_audit(tiny_config(model, train={"global_batch": 2 * size, "micro_batch": size}, **base)) for size in (2, 8)
    )
    weights = 2 * 2000 * 256 + 2 * (256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 1024)
    for report in (small, large):
        assert report.stages[0].steady_bytes == pytest.approx(4 * 4 * weights, rel=0.02)
    extra = [report.stages[0].peak_bytes - report.stages[0].steady_bytes for report in (small, large)]
    assert extra[1] > 2 * extra[0]


def generation_of(config: Config) -> str:
    return next((name for name in LNC_CHOICES if name in config.hardware), "trn1")


FAST_RECIPES = ("tiny-chat", "llama2-7b")


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[] if name in FAST_RECIPES else pytest.mark.nightly) for name in recipe_names()],
)
def test_recipe_with_few_layers_is_clean(recipe: str) -> None:
    """As the recipe, except for the layers and the pipeline ranks that held them, and for what GPUs alone have."""
    config = load(recipe)
    pp = min(config.layout.pp, 2)
    overrides = [f"model.layers={pp}", f"layout.pp={pp}", "layout.pipeline_cuts=[]"]
    overrides += ["model.capacity_factor=2.0"] if config.model.num_experts else []
    overrides += ["layout.zero=1"] if config.layout.zero > 1 else []
    if config.layout.ranks:
        overrides.append(f"layout.ranks={config.layout.ranks // config.layout.pp * pp}")
    report = run_audit(load(recipe, overrides), generation_of(config))
    on_gpus = "h100" in config.hardware or "h200" in config.hardware  # with more memory than a core
    violations = [violation for violation in report.violations if not (on_gpus and violation.rule == "memory")]
    assert violations == [], "\n".join(map(str, violations))
    assert report.graphs


def test_what_cannot_be_audited_is_one_line() -> None:
    with pytest.raises(UserError, match=r"layout.zero=3: .*; nearest: 1"):
        run_audit(load("qwen3-8b", ["model.layers=1"]), "trn1")
    with pytest.raises(UserError, match=r"model.capacity_factor=null: .*; nearest: 2.0"):
        run_audit(load("mixtral-8x7b", ["model.layers=4"]), "trn1")


@pytest.mark.parametrize("recipe", ["gpt3-6.7b", "bert-large-phase1"])
def test_one_step_of_other_families_is_clean(recipe: str) -> None:
    """One layer with dropout, one micro batch. A whole audit of these recipes is nightly: random numbers take thousands
    of operators."""
    config = load(recipe, ["model.layers=1"])
    layout = Layout.from_config(config, config.layout.ranks or 1)
    config = load(recipe, ["model.layers=1", f"train.global_batch={layout.dp * config.train.micro_batch}"])
    with dry_run(config, 0, layout.world_size, MetaTrainium("trn1", 1)) as trainer:
        trace = trace_steps(trainer, steps=1, with_evaluation=False)
    assert trace.abort_reason is None
    rules = (check_operators(trace, "trn1"), check_groups(trace, "trn1", 1), check_micro_batches(trace))
    assert [violation for violations in rules for violation in violations] == []


@pytest.mark.nightly
def test_recipe_at_full_size_is_clean() -> None:
    config = load("llama2-7b")
    report = audit(config, generation_of(config), 1, 2, lambda done, total: None)
    assert report.violations == [], "\n".join(map(str, report.violations))
    assert report.ranks == config.layout.ranks
    assert all(stage.peak_bytes > stage.steady_bytes > 0 for stage in report.stages)


def test_first_middle_and_last_rank_of_each_stage_are_traced() -> None:
    config = load("llama3-70b")
    jobs = trace_jobs(Layout.from_config(config, 512), config.layout.pipeline_schedule, range(512))
    assert {job.stage for job in jobs} == set(range(8))
    assert {job.rank for job in jobs if job.stage == 1} == {64, 112, 127}
    assert {job.micro_batches for job in jobs if job.full_step} == {8}


EVALUATED: dict[str, Any] = {"evaluate": {"every": 2, "batches": 2}, "data": {"validation_fraction": 0.2}}


def test_evaluation_has_its_own_graph() -> None:
    plain, evaluated = run_audit(tiny_config(ONE_LAYER)), run_audit(tiny_config(ONE_LAYER, **EVALUATED))
    assert evaluated.graphs == plain.graphs + 1
    assert "evaluation" in evaluated.stages[0].graphs


def test_metric_that_reads_a_value_to_the_host_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_metrics.py").write_text(
        "def half(output, batch):\n    return output.hidden.sum() * output.hidden.amax().item(), 1\n"
    )
    section = {**EVALUATED["evaluate"], "metrics": {"half": "my_metrics:half"}}
    report = run_audit(tiny_config(ONE_LAYER, evaluate=section, data=EVALUATED["data"]))
    assert [(each.rule, "my_metrics.py:2" in each.location) for each in report.violations] == [("host", True)]


def test_weights_of_several_buckets_arrive_during_the_next_step() -> None:
    """The second step begins before all weights of the first one arrive. Autograd must not take their arrival for a
    modification of saved tensors."""
    config = tiny_config({**LLAMA, **WIDER, "layers": 4}, layout={"zero": 1, "ranks": 2, "bucket_mib": 1})
    with dry_run(config, 0, 2, MetaTrainium("trn1", 1)) as trainer:
        trace = trace_steps(trainer, steps=2, with_evaluation=False)
    assert trace.abort_reason is None
    assert len(trace.phases["step 2"]) > len(trace.phases["step 1"])


def test_violations_of_one_line_are_merged_with_their_stages() -> None:
    violation = Violation("host", "x.py:1", "one", "fix", (0,))
    other = violation._replace(location="y.py:2")
    merged = merge_violations([violation, violation._replace(stages=(2,)), other])
    assert merged == [violation._replace(stages=(0, 2)), other]
