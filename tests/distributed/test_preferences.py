"""Objectives on pairs train the same model at every layout, packed or not: the mean over the pairs of the global
batch."""

import json
import random
from typing import Any

import pytest

from tests.distributed.test_layouts import JOB
from tests.distributed.test_packed_documents import LAYOUTS
from tests.support import configs
from tests.support.pool import Pool
from trainyard.config.schema import Config
from trainyard.data.loading.build import build_datasets
from trainyard.preflight.verify import VerifyRecord, compare_records, record_training
from trainyard.run.trainer import Trainer

PAIRS, SEQ_LEN = 16, 128
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"preference": {"variant": "ipo"}},
    "simpo": {},
    "cpo": {},
    "orpo": {"preference": {"beta": 2.0}},
    "dpo-lora": {"lora": {"rank": 3, "dora": True, "train": ["norms"]}},
}
"""Sections by a name that begins with the objective's."""
FAST = {("dpo", "single"), ("orpo", "cp2-ring"), ("cpo", "tp2-sp"), ("dpo", "pp2"), ("simpo", "dp2-zero1")}
CASES = [
    pytest.param(objective, layout, marks=[] if (objective, layout) in FAST else [pytest.mark.nightly])
    for objective in OBJECTIVES
    for layout in LAYOUTS
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Pairs of texts of many lengths."""
    draw = random.Random(0)

    def text(most: int) -> str:
        return "".join(draw.choices("abcdefgh ", k=draw.randrange(1, most)))

    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    records = [{"prompt": text(12), "chosen": text(20) + "y", "rejected": text(20) + "n"} for _ in range(PAIRS)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def configure(file: str, objective: str, layout: str, packing: bool) -> Config:
    train: dict[str, Any] = {"micro_batch": 1 if packing else 2, "objective": objective.partition("-")[0]}

    def config(samples: int) -> Config:
        return configs.tiny_config(
            {**configs.LLAMA, "layers": 2, "max_positions": SEQ_LEN // 2},
            data={"source": "preference", "paths": file, "seq_len": SEQ_LEN, "packing": packing, "tokenizer": "bytes"},
            train={"global_batch": samples, **train},
            **OBJECTIVES[objective],
            optimizer={"lr": 1e-3, "eps": 1e-3},
            layout=LAYOUTS[layout][1],
        )

    return config(len(build_datasets(config(2)).train)) if packing else config(PAIRS)


def train(pool: Pool, config: Config, layout: str) -> VerifyRecord:
    record: VerifyRecord = pool.run(JOB, (config, 1, ""), LAYOUTS[layout][0])[0]
    return record


@pytest.fixture(scope="module")
def padded(pool: Pool, file: str) -> dict[str, VerifyRecord]:
    """One step on one rank, by objective."""
    return {name: train(pool, configure(file, name, "single", False), "single") for name in OBJECTIVES}


def differences(record: VerifyRecord, reference: VerifyRecord) -> dict[str, float]:
    findings = compare_records(record, reference, "fp32")
    return {finding.quantity: finding.max_difference for finding in findings if finding.quantity != "batches"}


@pytest.mark.parametrize(("objective", "layout"), CASES)
def test_layout_equals_one_rank(
    pool: Pool, padded: dict[str, VerifyRecord], file: str, objective: str, layout: str
) -> None:
    found = differences(train(pool, configure(file, objective, layout, False), layout), padded[objective])
    assert max(found["loss"], found["gradients"], found["gradient norm"]) < 2e-6, found


@pytest.mark.parametrize("objective", ["dpo", pytest.param("orpo", marks=pytest.mark.nightly)])
def test_packed_equals_padded(pool: Pool, padded: dict[str, VerifyRecord], file: str, objective: str) -> None:
    found = differences(train(pool, configure(file, objective, "single", True), "single"), padded[objective])
    assert max(found["loss"], found["gradients"], found["gradient norm"]) < 2e-6, found


def test_scores_of_other_pairs_are_found(padded: dict[str, VerifyRecord], file: str) -> None:
    """Scores of the reference that are those of other pairs, as if joined by position."""

    def planted(trainer: Trainer) -> None:
        trainer.runner.add_reference = lambda batch: {
            **batch,
            "reference_scores": trainer.loss_fn.stand_in(batch)["reference_scores"].roll(1, 0),
        }

    record = record_training(configure(file, "dpo", "single", False), 1, planted)
    assert differences(record, padded["dpo"])["gradients"] > 1e-2
