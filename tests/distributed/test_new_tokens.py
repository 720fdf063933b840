"""A grown vocabulary trains alike at every layout, from a checkpoint that is smaller."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_layouts import JOB, SP
from tests.formats.test_tokenizer_files import train_tokenizer
from tests.support import configs
from tests.support.hf_reference import hf_reference
from tests.support.pool import Pool
from trainyard.families.hf_config import from_hf
from trainyard.preflight.verify import compare_records, single_rank_config


@pytest.mark.parametrize(
    ("variant", "ranks", "layout"),
    [
        ("llama", 2, {"tp": 2, **SP}),
        pytest.param("llama-tied", 4, {"tp": 2, "pp": 2}, marks=pytest.mark.nightly),
        pytest.param("gpt2", 2, {"zero": 3}, marks=pytest.mark.nightly),
    ],
)
def test_layouts_start_from_the_same_grown_weights(
    pool: Pool, tmp_path: Path, variant: str, ranks: int, layout: dict[str, Any]
) -> None:
    _, hf, hf_config = hf_reference(variant)
    hf.save_pretrained(tmp_path)
    tokenizer = train_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    # Rows of the tokenizer that the checkpoint lacks grow as well.
    model = {**from_hf(hf_config).model_dump(mode="json"), "new_tokens": ["<|im_start|>", "<|im_end|>", "<tool>"]}
    data = {"source": "text", "tokenizer": str(tmp_path), "paths": [str(tmp_path / "a.txt")]}
    (tmp_path / "a.txt").write_text("<|im_start|>hello there<|im_end|> <tool>" * 100)
    config = configs.tiny_config(
        model,
        data=data,
        layout=layout,
        checkpoint={"init_from": str(tmp_path)},
        optimizer={"lr": 1e-3, "eps": 1e-3},
        train={"micro_batch": 1},
    )
    record = pool.run(JOB, (config, 2), ranks)[0]
    reference = pool.run(JOB, (single_rank_config(config), 2), 1)[0]
    assert len(record.initial_weights["embedding.weight"]) == tokenizer.get_vocab_size() + 3
    findings = compare_records(record, reference, "fp32")
    assert all(finding.ok for finding in findings), "\n".join(map(str, findings))
