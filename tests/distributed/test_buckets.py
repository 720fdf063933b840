"""Batches of bucketed lengths train what padded ones of the same documents train, at every layout and after resuming at
another one; each length has its own graphs, none of them with dynamic shapes."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed.test_layouts import JOB, SP
from tests.support import configs
from tests.support.logs import captured_log
from tests.support.pool import Pool
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.data.loading import loader
from trainyard.parallel.layout import Layout
from trainyard.preflight.verify import VerifyRecord, compare_records, record_training
from trainyard.run.trainer import Trainer

STEPS, BUCKETS = 3, [8, 16, 32]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "dp2-zero1": (2, {"zero": 1}),
    "tp2-sp": (2, {"tp": 2, **SP}),
    "pp2": (2, {"pp": 2}),
    "cp2-ring": (2, {"cp": 2}),
    "dp2-zero3": (2, {"zero": 3}),
    "tp2-cp2-pp2": (8, {"tp": 2, "cp": 2, "pp": 2, **SP}),
}
FAST = ("single", "dp2-zero1", "tp2-sp", "pp2")
TOLERANCE = {"initial weights": 0.0, "loss": 1e-6, "gradient norm": 1e-6, "gradients": 1e-6}
"""Relative. The update divides gradients by their own magnitude, so weights differ more."""


def configure(name: str, **sections: dict[str, Any]) -> Config:
    data = {"source": "tests.support.conversations:make_conversations", "seq_len": 32, "buckets": BUCKETS}
    train = {"global_batch": 4, "micro_batch": 1, "steps": STEPS, "seed": 5, "embedding_noise": 5.0}
    return configs.tiny_config(
        {**configs.LLAMA, "layers": 2},
        **{
            "data": data,
            "train": train,
            "optimizer": {"lr": 1e-4, "eps": 1e-3},
            "layout": LAYOUTS[name][1],
            **sections,
        },
    )


@pytest.fixture(scope="module")
def padded() -> VerifyRecord:
    """The same documents, padded to data.seq_len on one rank."""
    with patch.object(loader, "shortened", lambda batch, seq_len: batch):
        return record_training(configure("single"), STEPS)


@pytest.mark.parametrize(
    "layout", [name if name in FAST else pytest.param(name, marks=pytest.mark.nightly) for name in LAYOUTS]
)
def test_bucketed_equals_padded(pool: Pool, padded: VerifyRecord, layout: str) -> None:
    record: VerifyRecord = pool.run(JOB, (configure(layout), STEPS), LAYOUTS[layout][0])[0]
    assert {batch["tokens"].shape[1] for batch in record.batches} == {8, 16, 32}
    findings = [each for each in compare_records(record, padded, "fp32") if each.quantity != "batches"]
    wrong = [str(each) for each in findings if each.max_difference > TOLERANCE.get(each.quantity, 1e-5)]
    assert not wrong, wrong


def test_resume_at_another_layout(pool: Pool, tmp_path: Path) -> None:
    run = "tests.distributed.rank_jobs:run"
    sections: dict[str, Any] = {"log": {"directory": str(tmp_path)}}
    saving = {"every": 1, "export_hf": False}
    first = pool.run(run, (configure("dp2-zero1", checkpoint=saving, **sections),), 2)[0]
    checkpoint = str(Path(first["directory"]) / "checkpoints" / "step_00000001")
    resuming = {"resume": checkpoint, "export_hf": False}
    resumed = pool.run(run, (configure("tp2-sp", checkpoint=resuming, **sections),), 2)[0]
    assert resumed["losses"] == pytest.approx(first["losses"][1:], rel=2e-6)


# The second has more graphs of one function than torch's default limit.
@pytest.mark.nightly
@pytest.mark.parametrize("buckets", [BUCKETS, [4, 6, 8, 10, 12, 14, 16, 20, 24, 32]])
def test_each_length_has_its_graphs(pool: Pool, tmp_path: Path, buckets: list[int]) -> None:
    """Those of a block, the embedding and the head, all in the first epoch."""
    data = configure("single").data.model_dump(mode="json")

    def graphs(buckets: list[int]) -> int:
        config = configure(
            "single",
            data={**data, "buckets": buckets},
            train={"global_batch": 1, "micro_batch": 1, "steps": 20},
            compile={"enabled": True},
            log={"directory": str(tmp_path), "every": 20},
        )
        counts: dict[str, int] = pool.run("tests.distributed.rank_jobs:graphs_of_run", (config,), 1)[0]
        return counts["end"]

    one, several = graphs([]), graphs(buckets)
    assert (several - one) % (len(buckets) - 1) == 0
    assert 1 <= (several - one) // (len(buckets) - 1) <= one


def test_the_log_counts_graphs_and_tokens(tmp_path: Path) -> None:
    lines: list[str] = []
    with captured_log(lines.append):
        trainer = Trainer(configure("single", log={"directory": str(tmp_path)}))
    assert any(
        line.startswith("3 graphs, for samples of 8 tokens (2), 16 tokens (2), 32 tokens (1)") for line in lines
    ), lines
    lengths = [trainer.loader.batch(step)["tokens"].shape[1] for step in range(12)]
    assert [trainer.throughput.count_tokens(step) for step in (1, 7, 12)] == [
        4 * sum(lengths[:step]) for step in (1, 7, 12)
    ]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"cp": 2}, r"layout\.cp=2: a length of data\.buckets=10 is not a multiple of 2 x cp = 4"),
        ({"tp": 4, **SP}, r"layout\.tp=4: .*a length of data\.buckets / cp = 10 / 1 divisible by tp"),
    ],
)
def test_every_length_must_divide(layout: dict[str, Any], message: str) -> None:
    data = {**configure("single").data.model_dump(mode="json"), "buckets": [10, 32]}
    with pytest.raises(UserError, match=message) as caught:
        Layout.from_config(configure("single", data=data, layout=layout), 4)
    assert "\n" not in str(caught.value)
