"""Training on each kind of dataset: neither the micro batch size nor the first step changes the samples of a step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import configs
from tests.support.token_files import write_counting_documents
from trainyard import Trainer
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.data.formats.bert_hdf5 import BertShape, record_dtype, write_samples
from trainyard.data.loading.dataset import Indices
from trainyard.data.samples import Sample
from trainyard.prepare.arrow_writer import ArrowDatasetWriter


def tokens(directory: Path) -> dict[str, Any]:
    write_counting_documents(directory / "a", [30, 7, 50, 1, 80], dtype="uint16")
    return {"source": "tokens", "paths": [str(directory / "a")], "document_mask": True, "mask_eod_loss": True}


def megatron(directory: Path) -> dict[str, Any]:
    write_counting_documents(directory / "a", [30, 7, 50, 1, 80], dtype="uint16")
    return {"source": "tokens", "paths": [str(directory / "a")], "order": "megatron"}


def blend(directory: Path) -> dict[str, Any]:
    write_counting_documents(directory / "a", [60, 40], dtype="uint16")
    write_counting_documents(directory / "b", [90], first_token=100, dtype="int32")
    paths = [str(directory / name) for name in "ab"]
    return {"source": "tokens", "paths": paths, "weights": [0.3, 0.7], "validation_fraction": 0.2}


def arrow(directory: Path) -> dict[str, Any]:
    with ArrowDatasetWriter(directory / "set", {"input_ids": "int32", "position_ids": "int32"}) as writer:
        rows = np.arange(20 * 16, dtype=np.int32).reshape(20, 16) % 250
        writer.add({"input_ids": rows, "position_ids": np.tile(np.arange(16, dtype=np.int32), (20, 1))})
    return {"source": "arrow", "paths": [str(directory / "set")], "document_mask": True}


def hdf5(directory: Path) -> dict[str, Any]:
    samples = np.zeros(30, record_dtype(16, 4, 128))
    rng = np.random.RandomState(0)
    samples["tokens"] = rng.randint(4, 128, (30, 16))
    samples["labels"], samples["masked_positions"] = rng.randint(4, 128, (30, 4)), [1, 3, 5, 7]
    samples["attention_mask"], samples["next_sentence_labels"] = 0xFF, rng.randint(0, 2, 30)
    write_samples(directory / "x_training_00000.hdf5", [samples], BertShape(30, 16, 4))
    return {"source": "hdf5", "paths": [str(directory / "*_training_*.hdf5")], "max_predictions": 4}


def data_config(data: dict[str, Any], micro_batch: int) -> Config:
    family = "bert" if data["source"] == "hdf5" else "llama"
    train = {"steps": 6, "global_batch": 4, "micro_batch": micro_batch}
    return configs.tiny_config(family, data={"seq_len": 16, **data}, train=train)


@pytest.mark.parametrize("make", [tokens, megatron, blend, arrow, hdf5])
def test_losses_do_not_depend_on_micro_batch_or_first_step(make: Any, tmp_path: Path) -> None:
    data = make(tmp_path)
    losses = []
    for micro_batch, first in ((1, 0), (4, 0), (2, 3)):
        trainer = Trainer(data_config(data, micro_batch))
        results = [trainer.train_step(trainer.loader.batch(step), step + 1, 0.0).loss for step in range(first, 6)]
        losses.append([float(loss) for loss in results])
    expected, one_micro_batch, from_step_3 = losses
    assert one_micro_batch == pytest.approx(expected, rel=1e-5)
    assert from_step_3 == pytest.approx(expected[3:], rel=1e-5)
    assert all(np.isfinite(expected))


class OwnDataset:
    """A dataset of the user's, whose samples have one wrong token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __len__(self) -> int:
        return 8

    def samples(self, indices: Indices) -> Sample:
        tokens = np.ones((len(indices), 16), np.int32)
        tokens[0, 5] = self.token
        return {"tokens": tokens, "labels": np.ones_like(tokens)}


@pytest.mark.parametrize("token", [configs.LLAMA["vocab"], 2**31 - 1, -1])
def test_token_of_an_own_dataset_outside_the_vocabulary_is_one_line(token: int) -> None:
    """A CPU raised IndexError, a GPU stops in a kernel, and tensor-parallel ranks would read zeros."""
    trainer = Trainer(data_config({"source": "synthetic"}, 2))
    trainer.loader.dataset = OwnDataset(token)
    with pytest.raises(UserError, match=rf"token {token}, but model\.vocab={configs.LLAMA['vocab']}; ") as caught:
        trainer._train_steps()
    assert "\n" not in str(caught.value)
