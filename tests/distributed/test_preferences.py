"""Objectives on pairs train the same model at every layout, packed or not: the mean over the pairs of the global
batch. A run resumes at another layout with the losses, and the scores of the reference, that it had."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_layouts import JOB
from tests.distributed.test_packed_documents import LAYOUTS as DENSE_LAYOUTS
from tests.support import configs
from tests.support.pool import Pool
from trainyard.config.schema import Config
from trainyard.data.loading.build import build_datasets
from trainyard.preflight.verify import VerifyRecord, compare_records, record_training
from trainyard.run.trainer import Trainer

PAIRS, SEQ_LEN, STEPS, SAVED_STEP = 16, 128, 3, 1
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {**DENSE_LAYOUTS, "dp2-zero2": (2, {"zero": 2})}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ep2": (2, {"ep": 2}),
    "ep2-zero1": (4, {"ep": 2, "zero": 1}),
    "ep2-tp2-zero3": (4, {"ep": 2, "tp": 2, "zero": 3}),
}
"""Of a mixture of experts."""
ALL_LAYOUTS = LAYOUTS | EXPERT_LAYOUTS
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"preference": {"variant": "ipo"}},
    "simpo": {},
    "cpo": {},
    "orpo": {"preference": {"beta": 2.0}},
    "kto": {"preference": {"beta": 0.02, "undesirable_weight": 0.7}},
    "reward": {"preference": {"center_weight": 0.1}},
    "dpo-lora": {"lora": {"rank": 3, "dora": True, "train": ["norms"]}},
    "dpo-experts": {"model": configs.MOE},
    "dpo-aot": {"preference": {"variant": "aot", "beta": 0.5}},
    "dpo-aot_unpaired": {"preference": {"variant": "aot_unpaired", "beta": 0.5}},
}
"""Sections by a name that begins with the objective's."""
FAST = {("dpo", "single"), ("orpo", "cp2-ring"), ("cpo", "tp2-sp"), ("dpo", "pp2"), ("simpo", "dp2-zero1")}
FAST |= {("dpo-experts", "ep2"), ("reward", "tp2-sp"), ("reward", "cp2-ring")}
FAST |= {("dpo-aot_unpaired", "dp2-zero1"), ("dpo-aot", "pp2")}
FAST |= {("kto", "dp2-zero1"), ("kto", "cp2-ring"), ("kto", "pp2")}
CASES = [
    pytest.param(objective, layout, marks=[] if (objective, layout) in FAST else [pytest.mark.nightly])
    for objective in OBJECTIVES
    for layout in (EXPERT_LAYOUTS if "experts" in objective else LAYOUTS)
]
PACKED = [("dpo", "single"), ("kto", "dp2-zero1")]
DEEP_PACKED = [("orpo", "single"), ("reward", "tp2-sp"), ("kto", "cp2-gather")]
RESUMES = [("dpo", "dp2-zero1", "tp2"), ("dpo", "dp2-zero1", "dp2-zero1")]
DEEP_RESUMES = [
    *(("orpo", "pp2", "cp2-ring"), ("simpo", "dp2-zero2", "single"), ("dpo-lora", "tp2-sp", "dp2-zero3")),
    *(("kto", "dp2-zero1", "tp2"), ("kto", "pp2", "dp2-zero3"), ("reward", "pp2", "tp2-sp"), ("reward", "tp2", "tp2")),
]


def with_deep(fast: list[Any], deep: list[Any]) -> list[Any]:
    return [*fast, *(pytest.param(*each, marks=pytest.mark.nightly) for each in deep)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Pairs of texts of many lengths."""
    draw = random.Random(0)

    def text(most: int) -> str:
        return "".join(draw.choices("abcdefgh ", k=draw.randrange(1, most)))

    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    texts = ({"prompt": text(12), "chosen": text(20) + "y", "rejected": text(20) + "n"} for _ in range(PAIRS))
    records = [{**each, "margin": index % 3} for index, each in enumerate(texts)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def configure(file: str, objective: str, layout: str, packing: bool = False, **others: Any) -> Config:
    # With this seed, data-parallel ranks have 18 and 14 of the packed answers of kto.
    train: dict[str, Any] = {"micro_batch": 1 if packing else 2, "objective": objective.partition("-")[0], "seed": 2}
    sections = {"model": configs.LLAMA, **OBJECTIVES[objective], **others}

    def config(samples: int) -> Config:
        return configs.tiny_config(
            {**sections["model"], "layers": 2, "max_positions": SEQ_LEN // 2},
            data={"source": "preference", "paths": file, "seq_len": SEQ_LEN, "packing": packing, "tokenizer": "bytes"},
            train={"global_batch": samples, **train, **sections.get("train", {})},
            **{key: value for key, value in sections.items() if key not in ("model", "train")},
            optimizer={"lr": 1e-3, "eps": 1e-3},
            layout=ALL_LAYOUTS[layout][1],
        )

    return config(len(build_datasets(config(2)).train))


def train(pool: Pool, config: Config, layout: str) -> VerifyRecord:
    record: VerifyRecord = pool.run(JOB, (config, 1, ""), ALL_LAYOUTS[layout][0])[0]
    return record


@pytest.fixture(scope="module")
def padded(pool: Pool, file: str) -> dict[str, VerifyRecord]:
    """One step on one rank, by objective."""
    return {name: train(pool, configure(file, name, "single"), "single") for name in OBJECTIVES}


def differences(record: VerifyRecord, reference: VerifyRecord) -> dict[str, float]:
    findings = compare_records(record, reference, "fp32")
    return {finding.quantity: finding.max_difference for finding in findings}


@pytest.mark.parametrize(("objective", "layout"), CASES)
def test_layout_equals_one_rank(
    pool: Pool, padded: dict[str, VerifyRecord], file: str, objective: str, layout: str
) -> None:
    found = differences(train(pool, configure(file, objective, layout), layout), padded[objective])
    assert max(found["loss"], found["gradients"], found["gradient norm"]) < 2e-6, found
    assert found["batches"] == 0


@pytest.mark.parametrize(("objective", "layout"), with_deep(PACKED, DEEP_PACKED))
def test_packed_equals_padded(
    pool: Pool, padded: dict[str, VerifyRecord], file: str, objective: str, layout: str
) -> None:
    """Data-parallel ranks have different numbers of pairs then, of which the mean is one over all."""
    found = differences(train(pool, configure(file, objective, layout, True), layout), padded[objective])
    assert max(found["loss"], found["gradients"], found["gradient norm"]) < 2e-6, found


def test_scores_of_other_pairs_are_found(padded: dict[str, VerifyRecord], file: str) -> None:
    """Scores of the reference that are those of other pairs, as if joined by position."""

    def planted(trainer: Trainer) -> None:
        trainer.runner.add_reference = lambda batch: {
            **batch,
            "reference_scores": trainer.loss_fn.stand_in(batch)["reference_scores"].roll(1, 0),
        }

    record = record_training(configure(file, "dpo", "single"), 1, planted)
    assert differences(record, padded["dpo"])["gradients"] > 1e-2


@pytest.mark.parametrize(("objective", "before", "after"), with_deep(RESUMES, DEEP_RESUMES))
def test_resume_at_another_layout(
    pool: Pool, file: str, tmp_path: Path, objective: str, before: str, after: str
) -> None:
    """The scores of the reference are those of the run that is resumed, whatever layout computed them."""

    def run(layout: str, directory: Path, checkpoint: dict[str, Any]) -> dict[str, Any]:
        sections = {"train": {"steps": STEPS, "global_batch": 4}, "log": {"directory": str(directory)}}
        config = configure(file, objective, layout, checkpoint=checkpoint, **sections)
        (result, *_) = pool.run("tests.distributed.rank_jobs:run", (config,), LAYOUTS[layout][0])
        return dict(result)

    whole = run(before, tmp_path / "whole", {"every": SAVED_STEP})
    saved = Path(whole["directory"]) / "checkpoints" / f"step_{SAVED_STEP:08d}"
    resumed = run(after, tmp_path / "resumed", {"resume": str(saved)})
    if before == after:
        assert resumed["losses"] == whole["losses"][SAVED_STEP:]  # bit for bit
    else:
        assert resumed["losses"] == pytest.approx(whole["losses"][SAVED_STEP:], rel=2e-6)


@pytest.mark.parametrize(
    "layout",
    ["pp2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("tp2-sp", "cp2-ring", "dp2-zero1"))],
)
@pytest.mark.parametrize("objective", ["dpo", pytest.param("kto", marks=pytest.mark.nightly)])
def test_a_live_reference_gives_the_same_losses(
    pool: Pool, file: str, tmp_path: Path, objective: str, layout: str
) -> None:
    """After an update, so that the reference differs from the model."""

    def losses(layout: str, reference: str) -> list[float]:
        config = configure(file, objective, layout)
        preference = config.preference.model_copy(update={"reference": reference})
        log = config.log.model_copy(update={"directory": str(tmp_path / layout / reference)})
        train = config.train.model_copy(update={"steps": 3})
        config = config.model_copy(update={"preference": preference, "log": log, "train": train})
        found: list[float] = pool.run("tests.distributed.rank_jobs:run", (config,), ALL_LAYOUTS[layout][0])[0]["losses"]
        return found

    stored = losses("single", "stored")
    assert losses(layout, "live") == pytest.approx(stored, rel=2e-6)
    assert len(set(stored)) == 3
