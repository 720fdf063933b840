"""The audit: clean on what comes with trainyard, and each planted violation found with its line."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.configs import LLAMA, tiny_config
from trainyard.audit.audit import AuditReport, audit, trace_jobs
from trainyard.audit.rules import Violation, merge_violations
from trainyard.config.load import load
from trainyard.config.recipes import recipe_names
from trainyard.config.schema import Config
from trainyard.devices.neuron.meta import MetaTrainium
from trainyard.devices.neuron.topology import LNC_CHOICES
from trainyard.dryrun.trace_rank import trace_rank
from trainyard.parallel.layout import Layout
from trainyard.parallel.process_group import NestedGroup
from trainyard.parallel.process_group import Group

HEAD = """
import os
import torch

calls = []

class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.sort(-1).values  # backward of one's own

def loss(output, batch):
    x, labels = output.hidden.float(), batch["labels"]
    calls.append(1)
"""
TAIL = """
    return x.sum(), (labels != -100).sum()
"""
# Lines of a loss, each with its own violation: the rule that it breaks, and what the violation must name.
PLANTS = {
    "sort": ("x = x + x.sort(-1).values", "operators", "aten.sort"),
    "topk": ("x = x + x.topk(3).values.sum()", "operators", "aten.topk"),
    "fft": ("x = x + torch.fft.rfft(x).abs().sum()", "operators", "aten._fft_r2c"),
    "complex": ("x = x + torch.view_as_real(torch.complex(x, x)).sum()", "dtypes", "complex64[2, 16, 32]"),
    "float64": ("x = (x.double() * 2).float()", "dtypes", "float64[2, 16, 32]"),
    "gather": ("x = x + x.gather(2, labels.clamp(0, 31).long()[..., None])", "int64", "int64[2, 16, 1]"),
    "look-up": ("x = x + torch.ones(300, device=x.device)[labels.long()].sum()", "int64", "aten.index"),
    "backward": ("x = x + x.max(-1).values.sum()", "int64", "in the backward pass of this line, aten.scatter"),
    "mask": ("x = x + x[labels != -100].sum()", "shapes", "aten.index"),
    "nonzero": ("places = (labels != 5).nonzero()", "shapes", "aten.nonzero"),
    "item": ("x = x * x.sum().item()", "host", "aten._local_scalar_dense"),
    "branch": ("x = x * 2 if (labels == 5).any() else x", "host", "aten._local_scalar_dense"),
    "to the host": ("x = x + float(x.detach().cpu().numpy().sum())", "host", "-> host float32[2, 16, 32]"),
    "equal": ("same = torch.equal(labels, labels.clone())", "host", "aten.equal"),
    "backward of one's own": ("x = Odd.apply(x)", "operators", "in the backward pass of this line, aten.sort"),
}


def run(found: Config, generation: str = "trn1") -> AuditReport:
    return audit(found, generation, LNC_CHOICES[generation][0], 1, lambda done, total: None)


def told(report: AuditReport) -> str:
    return "\n".join(map(str, report.violations))


def text_of(lines: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in lines.splitlines()) + TAIL


def line_of(text: str, mark: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.endswith(f"# {mark}"))


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Config, int]]:
    """A configuration whose loss has these lines; and the number of the line that ends in `# here`."""
    monkeypatch.syspath_prepend(tmp_path)

    def plant(lines: str, **sections: dict[str, Any]) -> tuple[Config, int]:
        name, text = f"plant_{abs(hash(lines))}", text_of(lines)
        (tmp_path / f"{name}.py").write_text(text)
        return tiny_config("llama", train={"loss": f"{name}:loss"}, **sections), line_of(text, "here")

    return plant


@pytest.fixture(scope="module")
def full_of_violations(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Violation]]:
    """A loss with every line of PLANTS, its text and what is said about it."""
    directory = tmp_path_factory.mktemp("planted")
    text = text_of("\n".join(f"{line}  # {name}" for name, (line, _, _) in PLANTS.items()))
    (directory / "everything.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        report = run(tiny_config("llama", train={"loss": "everything:loss"}))
    return text, report.violations


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_violation_is_found_at_its_line(name: str, full_of_violations: tuple[str, list[Violation]]) -> None:
    text, violations = full_of_violations
    _, rule, words = PLANTS[name]
    at = f"everything.py:{line_of(text, name)}"
    mine = [each for each in violations if each.rule == rule and each.location.split(" ")[0].endswith(at)]
    assert len(mine) == 1, "\n".join(map(str, violations))
    assert words in mine[0].description
    assert mine[0].fix


def test_nothing_else_is_said_of_planted_lines(full_of_violations: tuple[str, list[Violation]]) -> None:
    """Beyond what is planted: a sum over chosen elements has a shape that depends on values in backward as well."""
    text, violations = full_of_violations
    known = {line_of(text, name) for name in PLANTS}
    assert {int(each.location.split(":")[1].split(" ")[0]) for each in violations if each.rule != "recompiles"} <= known


@pytest.mark.parametrize(
    ("lines", "words"),
    [("x = x * len(calls)  # here", "aten.mul.Tensor"), ("x = x[:, : 1 + len(calls)]  # here", "aten.slice")],
    ids=["number", "shape"],
)
def test_a_graph_that_knows_its_step_is_found(
    lines: str, words: str, planted: Callable[..., tuple[Config, int]]
) -> None:
    found, number = planted(lines)
    (violation,) = [each for each in run(found).violations if each.rule == "recompiles"]
    assert f".py:{number}" in violation.location
    assert words in violation.description


def test_a_clean_loss_of_ones_own_is_clean(planted: Callable[..., tuple[Config, int]]) -> None:
    found, _ = planted("x = torch.where(labels[..., None] == 5, x, 0.0)  # here")
    assert run(found).violations == []


LARGER = {"hidden": 256, "ffn": 1024, "vocab": 2000}
RANKS = {"tp": 2, "ranks": 4, "sequence_parallel": True, "zero": 1}


@pytest.mark.parametrize(
    "lines",
    ['x = x * int(os.environ["RANK"])  # here', 'x = x.chunk(4, -1)[int(os.environ["RANK"])] * 2  # here'],
    ids=["constant", "part"],
)
def test_a_graph_that_knows_its_rank_is_found(lines: str, planted: Callable[..., tuple[Config, int]]) -> None:
    found, number = planted(lines, layout=RANKS)
    assert os.environ.get("RANK") is None
    (violation,) = [each for each in run(found).violations if each.rule == "ranks"]
    assert f".py:{number}" in violation.location


def test_a_group_of_six_ranks_is_refused() -> None:
    found = tiny_config(
        {"family": "gpt", "vocab": 260, "hidden": 48, "layers": 2, "heads": 6, "ffn": 48, "max_positions": 64},
        layout={"tp": 6, "ranks": 6},
    )
    violations = run(found).violations
    assert {each.rule for each in violations} == {"groups"}
    assert any("6 ranks" in each.description and "trainyard/" in each.location for each in violations)


def test_a_size_that_the_chip_refuses_is_told_before_anything_is_traced() -> None:
    report = run(tiny_config({**LLAMA, "heads": 8, "kv_heads": 8}, layout={"tp": 8, "ranks": 8}), "trn2")
    (violation,) = report.violations
    assert violation.rule == "groups"
    assert "layout.tp=8" in violation.description


def test_what_does_not_fit_is_told_with_the_line_of_the_peak() -> None:
    large = load("llama2-7b", ["layout.tp=1", "layout.zero=0", "layout.ranks=1", "model.layers=4"])
    (violation,) = [each for each in run(large).violations if each.rule == "memory"]
    assert "a rank has 16" in violation.description
    assert ".py:" in violation.location
    assert not [each for each in run(large, "trn3").violations if each.rule == "memory"]


def test_memory_is_that_of_weights_optimizer_and_activations() -> None:
    """Between steps a rank keeps fp32 weights, gradients and two moments; the peak is above that, and grows with the
    micro batch."""
    model = {**LLAMA, **LARGER, "layers": 2}
    base: dict[str, Any] = {"data": {"seq_len": 64}, "precision": {"kind": "fp32"}}
    small, large = (
        run(tiny_config(model, train={"global_batch": 2 * size, "micro_batch": size}, **base)) for size in (2, 8)
    )
    weights = 2 * 2000 * 256 + 2 * (256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 1024)
    for report in (small, large):
        assert report.stages[0].steady_bytes == pytest.approx(4 * 4 * weights, rel=0.02)
    assert large.stages[0].peak_bytes - large.stages[0].steady_bytes > 2 * (
        small.stages[0].peak_bytes - small.stages[0].steady_bytes
    )


def generation_of(found: Config) -> str:
    return next((each for each in LNC_CHOICES if each in found.hardware), "trn1")


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.nightly] if "70b" in name else []) for name in recipe_names()]
)
def test_every_recipe_is_clean_with_few_layers(recipe: str) -> None:
    """All but the layers, and the pipeline ranks that those took, is as in the recipe."""
    found = load(recipe)
    pp = min(found.layout.pp, 2)
    words = [f"model.layers={pp}", f"layout.pp={pp}", "layout.pipeline_cuts=[]"]
    if found.layout.ranks:
        words.append(f"layout.ranks={found.layout.ranks // found.layout.pp * pp}")
    report = run(load(recipe, words), generation_of(found))
    assert report.violations == [], told(report)
    assert report.graphs


@pytest.mark.nightly
def test_a_recipe_is_clean_at_full_size() -> None:
    found = load("llama2-7b")
    report = audit(found, generation_of(found), 1, 2, lambda done, total: None)
    assert report.violations == [], told(report)
    assert report.ranks == found.layout.ranks
    assert all(stage.peak_bytes > stage.steady_bytes > 0 for stage in report.stages)


def test_ranks_and_micro_batches_that_are_followed() -> None:
    found = load("llama3-70b")
    jobs = trace_jobs(found, Layout.from_config(found, 512), range(512))
    assert {job.stage for job in jobs} == set(range(8))
    assert {job.rank for job in jobs if job.stage == 1} == {64, 112, 127}
    assert {job.micro_batches for job in jobs if job.full_step} == {8}


def test_evaluation_adds_its_own_graph() -> None:
    plain = run(tiny_config("llama"))
    evaluated = run(tiny_config("llama", evaluate={"every": 2, "batches": 2}, data={"validation_fraction": 0.2}))
    assert evaluated.graphs == plain.graphs + 1
    assert "evaluation" in evaluated.stages[0].graphs


def test_a_metric_that_asks_the_host_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "measure.py").write_text(
        "def half(output, batch):\n    return output.hidden.sum() * output.hidden.amax().item(), 1\n"
    )
    section = {"every": 2, "batches": 2, "metrics": {"half": "measure:half"}}
    report = run(tiny_config("llama", evaluate=section, data={"validation_fraction": 0.2}))
    assert [(each.rule, "measure.py:2" in each.location) for each in report.violations] == [("host", True)]


def test_weights_of_several_buckets_land_while_the_next_step_runs() -> None:
    """The second step begins before the first one's weights have come: autograd must not call that a change."""
    model = {**LLAMA, **LARGER, "layers": 4}
    found = tiny_config(model, layout={"zero": 1, "ranks": 2, "bucket_mib": 1})
    trace = trace_rank(found, 0, 2, MetaTrainium("trn1", 1), 2, with_evaluation=False)
    assert trace.abort_reason is None
    assert len(trace.phases["step 2"]) > len(trace.phases["step 1"])


class Pretended(Group):
    """A group whose sum is over what every rank of it said."""

    def all_reduce_sum(self, x: torch.Tensor) -> torch.Tensor:
        SAID.append(x)
        return TOTAL[0]


SAID: list[torch.Tensor] = []
TOTAL: list[torch.Tensor] = []


def test_neighbours_sum_within_a_larger_group() -> None:
    """Six ranks in threes: each gets the sum of its own three."""
    SAID.clear()
    values = [torch.randn(2, 3) for _ in range(6)]
    groups = [NestedGroup.contiguous(Pretended(tuple(range(6)), rank), 3, torch.device("cpu")) for rank in range(6)]
    TOTAL[:] = [torch.zeros(2, 6)]
    for group, value in zip(groups, values, strict=True):
        group.all_reduce_sum(value)
    TOTAL[:] = [torch.stack(SAID).sum(0)]
    for rank, (group, value) in enumerate(zip(groups, values, strict=True)):
        mine = values[rank // 3 * 3 : rank // 3 * 3 + 3]
        assert torch.allclose(group.all_reduce_sum(value), torch.stack(mine).sum(0))
        assert group.ranks == tuple(range(rank // 3 * 3, rank // 3 * 3 + 3))


def test_the_same_line_is_told_once_with_its_stages() -> None:
    a = Violation("host", "x.py:1", "one", "fix", (0,))
    assert merge_violations([a, a._replace(stages=(2,)), a._replace(location="y.py:2")]) == [
        a._replace(stages=(0, 2)),
        a._replace(location="y.py:2"),
    ]
