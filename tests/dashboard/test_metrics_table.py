"""Columns of metrics and what is selected of them: nothing a chart must show is lost, and any record is survived."""

import json
import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.dashboard.run_writer import training_record
from tests.support.examples import examples
from trainyard.dashboard import metrics_table
from trainyard.dashboard.metrics_table import COLUMNS, MetricsTable

VALUES = st.one_of(
    st.floats(), st.integers(), st.sampled_from(["nan", "inf", "-inf", "1e5", "", None, True, [], {}, 10**400])
)
RECORDS = st.dictionaries(
    st.sampled_from(
        [
            *COLUMNS,
            "consumed_tokens",
            "consumed_samples",
            "not_finite",
            "evaluate/loss",
            "evaluate/x",
            "rewards/chosen",
            "rewards/x",
            "kl",
            "/",
            "//",
        ]
    ),
    VALUES,
)


def strict_json(data: Any) -> Any:
    return json.loads(json.dumps(data, allow_nan=False))


@examples(200)
@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=400),
    st.integers(1, 30),
)
def test_every_bucket_keeps_its_extremes(losses: list[float], buckets: int) -> None:
    table = MetricsTable()
    table.append([{"step": step, "loss": loss} for step, loss in enumerate(losses)])
    found = strict_json(table.select(buckets))
    steps, kept = found["columns"]["step"], found["columns"]["loss"]
    assert steps == sorted(steps)
    if len(losses) <= metrics_table.ROWS_PER_BUCKET * buckets:
        assert steps == list(range(len(losses)))
        return
    size = math.ceil(len(losses) / buckets)
    for start in range(0, len(losses), size):
        bucket = losses[start : start + size]
        shown = [loss for step, loss in zip(steps, kept, strict=True) if start <= step < start + size]
        assert np.isclose(max(shown), max(bucket), rtol=1e-5)
        assert np.isclose(min(shown), min(bucket), rtol=1e-5)
    means = [np.mean(losses[start : start + size]) for start in range(0, len(losses), size)]
    assert np.allclose(found["means"]["loss"], means, rtol=1e-4, atol=1e-9)


@examples(300)
@given(st.lists(RECORDS, max_size=40), st.integers(1, 5), st.sampled_from(["step", "tokens", "time"]), st.floats())
def test_any_records_give_valid_json(records: list[dict[str, Any]], buckets: int, axis: str, low: float) -> None:
    table = MetricsTable(tokens_per_sample=256)
    table.append(records)
    for found in (table.select(buckets, axis), table.select(buckets, axis, low, low + 1), table.select_after(0)):
        strict_json(found)
        assert len({len(values) for values in found["columns"].values()}) == 1
    strict_json([values for _, values in table.evaluations])


def test_a_single_spike_in_a_long_run_survives_and_memory_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(metrics_table, "MAX_ROWS", 4000)
    table = MetricsTable()
    for start in range(0, 15_000, 1000):
        records = [training_record(step) for step in range(start, start + 1000)]
        if start == 10_000:
            records[123] |= {"loss": 99.0}
        if start == 7000:
            records[55] |= {"grad_norm": 1234.0}
        table.append(records)
        assert table.count <= 4000
    columns = table.select(100)["columns"]
    assert 99.0 in columns["loss"]
    assert columns["step"][columns["loss"].index(99.0)] == 10_123
    assert 1234.0 in columns["grad_norm"]
    assert columns["step"][-1] == 14_999


def test_tokens_of_records_that_have_only_samples() -> None:
    table = MetricsTable(tokens_per_sample=256)
    table.append([{"step": 1, "loss": 1.0, "consumed_samples": 16}, {"step": 2, "loss": 1.0, "consumed_tokens": 9}])
    assert table.select(10)["columns"]["tokens"] == [4096, 9]


def test_a_range_has_a_neighbor_on_each_side() -> None:
    table = MetricsTable()
    table.append([training_record(step) for step in range(1, 101)])
    assert table.select(100, "step", 40, 42)["columns"]["step"] == [39, 40, 41, 42, 43]


def test_metrics_with_a_prefix_are_columns_from_their_first_record_on() -> None:
    table = MetricsTable()
    table.append([{"step": 1, "loss": 1.0, "x": 5.0, "x/": 5.0, "evaluate/loss": 2.0}])
    assert table.names == [*COLUMNS]
    rewards = {"rewards/chosen": 0.5, "kl": 0.25, "evaluate/rewards/chosen": 9.0}
    table.append([{"step": 2, "loss": 1.0, **rewards}, {"step": 3, "loss": 1.0, "rewards/chosen": "nan"}])
    found = strict_json(table.select(20))["columns"]
    assert (found["rewards/chosen"], found["kl"]) == ([None, 0.5, None], [None, 0.25, None])
    assert found.keys() == {*COLUMNS, "rewards/chosen", "kl"}
    table.append([{"step": 4, "loss": 1.0, **{f"rewards/{number}": 1.0 for number in range(100)}}])
    assert len(table.names) == len(COLUMNS) + metrics_table.MAX_METRICS
    assert table.select_after(3)["columns"]["rewards/7"] == [1.0]


def test_a_spike_of_any_metric_survives() -> None:
    names = [f"rewards/{number}" for number in range(metrics_table.MAX_METRICS)]
    records = [{**training_record(step), **{name: math.sin(step) for name in names}} for step in range(5000)]
    for number, name in enumerate(names):
        records[100 + 200 * number][name] = 50.0
    table = MetricsTable()
    table.append(records)
    columns = table.select(100)["columns"]
    for number, name in enumerate(names):
        assert columns["step"][columns[name].index(50.0)] == 100 + 200 * number
    common = MetricsTable()
    common.append([training_record(step) for step in range(5000)])
    assert len(columns["step"]) <= 2 * len(common.select(100)["columns"]["step"])
