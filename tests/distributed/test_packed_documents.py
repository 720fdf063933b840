"""Packed and padded samples of the same documents train the same model, at every layout: the global batch of both holds
all documents, and its loss is divided by its trained tokens."""

from typing import Any

import pytest

from tests.distributed.test_layouts import JOB, SP
from tests.support import configs
from tests.support.conversations import LENGTHS
from tests.support.pool import Pool
from trainyard.config.schema import Config
from trainyard.preflight.verify import VerifyFinding, VerifyRecord, compare_records

PACKS, SEQ_LEN = 8, 32
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**configs.LLAMA, "layers": 2},
    "gpt": {**configs.GPT, "layers": 2},
    "window": {**configs.LLAMA, "family": "mistral", "sliding_window": 7},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, **SP}),
    "cp2-ring": (2, {"cp": 2}),
    "cp2-gather": (2, {"cp": 2, "cp_method": "all_gather"}),
    "pp2": (2, {"pp": 2}),
    "dp2-zero1": (2, {"zero": 1}),
    "dp2-zero3": (2, {"zero": 3}),
    "tp2-cp2-pp2": (8, {"tp": 2, "cp": 2, "pp": 2, **SP}),
}
TOLERANCE = {"initial weights": 0.0, "loss": 1e-6, "gradient norm": 1e-6, "gradients": 1e-6}
"""Relative. The update divides gradients by their own magnitude, so weights differ more."""
FAST = {("llama", "single"), ("gpt", "cp2-ring"), ("window", "single"), ("llama", "tp2-sp")}
CASES = [
    pytest.param(model, layout, marks=[] if (model, layout) in FAST else [pytest.mark.nightly])
    for model in MODELS
    for layout in LAYOUTS
]


def configure(model: str, layout: str, packing: bool, micro_batch: int) -> Config:
    return configs.tiny_config(
        MODELS[model],
        data={
            "source": "tests.support.conversations:make_conversations",
            "seq_len": SEQ_LEN,
            "packing": packing,
        },
        train={"global_batch": PACKS if packing else len(LENGTHS), "micro_batch": micro_batch},
        optimizer={"lr": 1e-3, "eps": 1e-3},
        layout=LAYOUTS[layout][1],
    )


@pytest.fixture(scope="module")
def padded(pool: Pool) -> dict[str, VerifyRecord]:
    """One step of padded samples on one rank, by model."""
    return {model: pool.run(JOB, (configure(model, "single", False, 2), 1), 1)[0] for model in MODELS}


def compare(
    pool: Pool, padded: dict[str, VerifyRecord], model: str, layout: str, packing: bool = True, planted: str = ""
) -> list[VerifyFinding]:
    """What differs from padded samples on one rank, besides the batches themselves."""
    config = configure(model, layout, packing, micro_batch=1 if packing else 2)
    record: VerifyRecord = pool.run(JOB, (config, 1, planted), LAYOUTS[layout][0])[0]
    findings = compare_records(record, padded[model], "fp32")
    return [finding for finding in findings if finding.quantity != "batches"]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_packed_equals_padded(pool: Pool, padded: dict[str, VerifyRecord], model: str, layout: str) -> None:
    findings = compare(pool, padded, model, layout)
    wrong = [str(finding) for finding in findings if finding.max_difference > TOLERANCE.get(finding.quantity, 1e-5)]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("model", "planted"),
    [
        ("llama", "documents-see-each-other"),
        ("llama", "mean-of-micro-batch-means"),
        ("gpt", "positions-not-reset"),
        pytest.param("gpt", "documents-see-each-other", marks=pytest.mark.nightly),
    ],
)
def test_planted_error_is_found(pool: Pool, padded: dict[str, VerifyRecord], model: str, planted: str) -> None:
    """Gradients reveal each of them. (The reported loss is a sum over a count even if gradients are means of means, and
    rotary positions that go on change nothing: only their differences within a document matter.)"""
    findings = {finding.quantity: finding for finding in compare(pool, padded, model, "single", planted=planted)}
    assert findings["gradients"].max_difference > 1e-3
