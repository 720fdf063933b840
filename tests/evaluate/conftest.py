"""Checkpoints and data that the tests of evaluation share."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.hf_folders import TEXTS, VOCAB, save_hf_folder
from trainyard.core.world import ONE_RANK
from trainyard.evaluate.eval_config import evaluation_config
from trainyard.evaluate.evaluator import CheckpointSource, evaluate_data
from trainyard.formats.registry import open_weights

HfFolder = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> HfFolder:
    """The folder of a family's model, and the model."""

    @cache
    def save(family: str) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp(family)
        return directory, save_hf_folder(directory, family)

    return save


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "valid.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="session")
def hdf5_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "valid.hdf5"
    write_sentence_pairs(path, samples=13)
    return path


def write_sentence_pairs(path: Path, samples: int, seq_len: int = 32, predictions: int = 5) -> None:
    """Masked sentence pairs in the layout of the public training scripts, some with padding and fewer predictions."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, seq_len + 1, samples)
    counts = rng.integers(1, predictions + 1, samples)
    positions = np.stack([rng.permutation(np.arange(1, 19))[:predictions] for _ in range(samples)])
    positions[np.arange(predictions) >= counts[:, None]] = 0
    mask = np.arange(seq_len) < lengths[:, None]
    with h5py.File(path, "w") as file:
        file["input_ids"] = np.where(mask, rng.integers(1, VOCAB, (samples, seq_len)), 0).astype("i4")
        file["input_mask"] = mask.astype("i1")
        file["segment_ids"] = (mask & (np.arange(seq_len) > 9)).astype("i1")
        file["masked_lm_positions"] = positions.astype("i4")
        file["masked_lm_ids"] = np.where(positions > 0, rng.integers(1, VOCAB, positions.shape), 0).astype("i4")
        file["next_sentence_labels"] = rng.integers(0, 2, samples).astype("i1")


def evaluate_one(checkpoint: Path, data: str | Path, *overrides: str, **options: Any) -> dict[str, Any]:
    """Evaluate a checkpoint in this process; returns the results of its only data set."""
    opened = open_weights(checkpoint)
    config = evaluation_config(opened.weights, ["device.name=cpu", *overrides], 1)
    is_given = any(override.startswith("data.seq_len=") for override in overrides)
    source = CheckpointSource(checkpoint, opened, config, ONE_RANK)
    (result,) = evaluate_data(source, [str(data)], seq_len_is_given=is_given, **options)
    return result
