"""`trainyard plan` as a user calls it: reports, refusals, search, comparison with a run."""

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainyard.cli.commands.plan import plan
from trainyard.cli.run_config import load_source
from trainyard.config.load import dump, load
from trainyard.config.recipes import recipe_names
from trainyard.core.errors import UserError
from trainyard.data.formats.megatron_bin import MegatronTokensWriter
from trainyard.models import family_of
from trainyard.preflight.plan.compare_measured import run_hardware
from trainyard.preflight.plan.hardware.spec import parse_hardware
from trainyard.preflight.plan.report import make_plan, suggest_changes

TRN1 = "trn1.32xlarge:4"
NXDT = Path(__file__).parents[2] / "config" / "nxdt"


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0, **options: Any) -> Any:
    """The JSON of a plan, which must end with exit code `code`."""
    source, *overrides = arguments
    assert plan(source, overrides, **{"hardware": TRN1, "as_json": True, **options}) == code
    return json.loads(capsys.readouterr().out)


def problems(output: Any) -> list[str]:
    return [problem["message"] for problem in output["problems"]]


PLANNED_FAST = ("llama3-70b", "bert-large-phase1", "gpt3-6.7b", "mixtral-8x7b")


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=[] if name in PLANNED_FAST else pytest.mark.nightly)
        for name in recipe_names()
        if name != "tiny-llama"
    ],
)
def test_every_recipe_has_a_plan_in_100_columns(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = plan(recipe, [])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any("tokens/s" in line for line in lines)
    assert (code == 2) == any(line.startswith("  fails") for line in lines)


def test_numbers_of_a_plan_are_consistent(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan_json(capsys, "llama2-7b", price=10.0)
    config = load("llama2-7b")
    step, cost = out["step"]["seconds"], out["cost"]
    assert cost["sequences_per_second"] * step == pytest.approx(256)
    assert cost["dollars"] == pytest.approx(4 * 10 * config.train.steps * step / 3600)
    assert cost["mfu_full"] > cost["mfu_causal"] > 0.05
    weights = family_of(config.model).blueprint(config.model).parameter_count()
    assert out["memory"][0]["weights"] == pytest.approx(2 * weights / 8, rel=0.1)
    assert sum(value for name, value in out["step"].items() if name not in ("seconds", "slowest")) == pytest.approx(
        step
    )
    assert out["messages"]["tp"]["messages"] > out["messages"]["dp"]["messages"]


def test_search_prints_overrides_and_the_rank_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("gpt3-6.7b", [], hardware="trn1.32xlarge:1", search=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("best: ")) <= 100
    assert sum(bool(re.match(r"(\d+ )?file ", line)) for line in lines) == 1
    (best,) = (line.removeprefix("best: ").split() for line in lines if line.startswith("best: "))
    file, faster = (plan_json(capsys, "gpt3-6.7b", *overrides, hardware="trn1.32xlarge:1") for overrides in ([], best))
    assert faster["step"]["seconds"] < file["step"]["seconds"]
    assert faster["fits"]


def test_run_that_does_not_fit_fails_with_a_fix_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["llama2-7b", "train.micro_batch=16"]
    out = plan_json(capsys, *arguments, code=2)
    assert not out["fits"]
    message = next(problem["message"] for problem in out["problems"] if problem["fatal"])
    fix = message.split("nearest: ")[1].split(" (")[0].split()
    assert plan_json(capsys, *arguments, *fix)["fits"]


def test_refused_group_size_fails_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan_json(capsys, "llama2-7b", code=2, hardware="trn2.48xlarge:2")
    assert "layout.tp=8: not supported on trn2 with LNC 2; nearest: 4 or 16" in problems(out)


def test_ring_attention_is_planned_as_trainium_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The graph of a ring would depend on the rank: keys and values are gathered."""
    gathered, ring = (
        plan_json(capsys, "llama3-70b-cp", f"layout.cp_method={method}", hardware="trn1.32xlarge:16")
        for method in ("all_gather", "ring")
    )
    assert ring["step"] == gathered["step"]
    (message,) = set(problems(ring)) - set(problems(gathered))
    assert message.startswith("layout.cp_method=ring: Trainium gathers keys and values instead")
    assert not any(problem["fatal"] for problem in ring["problems"])


def test_impossible_layout_is_one_line() -> None:
    with pytest.raises(UserError, match=r"layout\.tp=5: does not divide") as error:
        plan("llama2-7b", ["layout.tp=5"], hardware=TRN1)
    assert "\n" not in str(error.value)


def test_full_disk_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"checkpoint.directory={tmp_path}", "checkpoint.every=1", "checkpoint.keep=1000000"]
    messages = problems(plan_json(capsys, "tiny-llama", *overrides, hardware="h200:1"))
    assert any(line.startswith("disk: 1000001 checkpoints") and "checkpoint.keep=" in line for line in messages)


def test_copies_of_a_checkpoint_must_fit_into_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small-host.yaml"
    file.write_text(f"trn1.32xlarge: {{host_memory: {8 * 2**30}}}\n")
    out = plan_json(capsys, "llama2-7b", hardware_file=file, code=2)
    message = next(message for message in problems(out) if message.startswith("host memory"))
    fix = message.split("nearest: ")[1]
    fixed = plan_json(capsys, "llama2-7b", fix, hardware_file=file)
    assert not any(message.startswith("host memory") for message in problems(fixed))


@pytest.mark.parametrize(("steps", "repeats"), [(5, False), (100, True)])
def test_repeated_data_is_reported(
    tmp_path: Path, steps: int, repeats: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with MegatronTokensWriter(tmp_path / "x", "uint16") as writer:
        writer.add(np.ones(64 * 100 + 1, np.uint16), np.array([64 * 100 + 1], np.int32), np.array([1], np.int64))
    overrides = ["data.source=tokens", f"data.paths=[{tmp_path}/x]", "data.seq_len=64", "data.validation_fraction=0.0"]
    overrides += ["evaluate.every=0", f"train.steps={steps}"]
    messages = problems(plan_json(capsys, "tiny-llama", *overrides, hardware="h200:1"))
    repeated = [line for line in messages if "1,600 samples needed, data.paths has 100: 16.0 epochs" in line]
    assert repeated == messages[:repeats]


def test_run_directory_is_compared_with_its_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load("llama2-7b")
    (tmp_path / "config.yaml").write_text(dump(config))
    out = plan_json(capsys, "llama2-7b")
    seconds = out["step"]["seconds"]
    records = [
        {"step": n, "ms_per_iteration": ms, "tokens_per_second": 1e3 * n, "memory_bytes": 2**30, "mfu": 0.1}
        for n, ms in enumerate((9e9, 9e9, 2000 * seconds, 2000 * seconds), 1)
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records) + '{"step": 5, "ms_'
    )
    rows = {row["name"]: row for row in plan_json(capsys, str(tmp_path))}
    assert rows["ms per step"]["ratio"] == pytest.approx(0.5)
    assert rows["memory, GiB"]["measured"] == 1
    assert plan(str(tmp_path), [], hardware=TRN1) == 0
    assert "predicted  measured  ratio" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "error"), [({}, "config.yaml is missing"), ({"metrics.jsonl": ""}, "has no step yet")]
)
def test_directory_that_is_not_a_run_is_one_line(tmp_path: Path, files: dict[str, str], error: str) -> None:
    if files:
        (tmp_path / "config.yaml").write_text(dump(load("llama2-7b")))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=error):
        plan(str(tmp_path), [], hardware=TRN1)


@pytest.mark.parametrize(
    ("device", "ranks", "name"),
    [
        ("NVIDIA H200, 140 GiB", 4, "h200:4"),
        ("CPU, 2 threads", 2, "cpu:2"),
        ("trn1.32xlarge through XLA, a core of 16 GiB", 64, "trn1.32xlarge:2"),
    ],
)
def test_hardware_of_a_run_is_recognized(device: str, ranks: int, name: str, tmp_path: Path) -> None:
    """That of its last start, if it was resumed elsewhere."""
    first = {"step": 1, "ms_per_iteration": 5.0, "device": "CPU, 1 thread", "ranks": 8}
    resumed = {"step": 3, "ms_per_iteration": 5.0, "device": device, "ranks": ranks}
    records = [first, {"step": 2, "ms_per_iteration": 5.0}, resumed, {"step": 4, "ms_per_iteration": 5.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert run_hardware(tmp_path) == name


@pytest.mark.parametrize("path", sorted(NXDT.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_of_nxd_training_have_plans_that_fit(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, node = ("trn2.48xlarge", 64) if path.stem.endswith("trn2") else ("trn1.32xlarge", 32)
    overrides = ["model.vocab=32000"] if "megatron_mixtral" in path.stem else []
    ranks = load_source(path, overrides, warn=lambda line: None).layout.ranks
    assert ranks
    hardware, dropless = f"{name}:{ranks // node}", path.stem.endswith("dropless")
    assert plan(str(path), overrides, hardware=hardware, as_json=True) == (2 if dropless else 0)
    output = json.loads(capsys.readouterr().out)
    assert output["step"]["seconds"] > 0
    assert any("static shapes" in problem for problem in problems(output)) == dropless


def test_plan_of_too_many_layers_is_one_line() -> None:
    """A plan of a million layers ran for minutes."""
    with pytest.raises(UserError, match=r"model\.layers=1000000") as error:
        load("llama3-70b", ["model.layers=1000000"])
    assert "\n" not in str(error.value)


@pytest.mark.nightly
def test_plan_of_as_many_layers_as_allowed_takes_seconds() -> None:
    start = time.process_time()
    prediction = make_plan(load("llama3-70b", ["model.layers=10000"]), parse_hardware("trn1.32xlarge:16"))
    assert not prediction.fits
    suggest_changes(prediction)
    assert time.process_time() - start < 60
