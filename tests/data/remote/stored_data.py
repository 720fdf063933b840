"""Data sets of every format on the disk and in a bucket, and the batches that training reads from them."""

import gzip
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from tests.support import configs
from trainyard.config.schema import Config
from trainyard.core.batch import Batch
from trainyard.data.formats.bert_hdf5 import BertShape, record_dtype, write_samples
from trainyard.data.formats.megatron_bin import MegatronTokensWriter
from trainyard.data.loading.build import build_datasets
from trainyard.data.loading.loader import BatchLoader
from trainyard.prepare.arrow_writer import ArrowDatasetWriter

SEQ_LEN, VOCAB, GLOBAL_BATCH, STEPS = 32, 250, 8, 12


def write_tokens(prefix: Path, seed: int, dtype: str = "uint16", num_documents: int = 400) -> None:
    rng = np.random.RandomState(seed)
    lengths = rng.randint(1, 150, num_documents).astype(np.int32)
    with MegatronTokensWriter(prefix, dtype) as writer:
        writer.add(rng.randint(0, VOCAB, lengths.sum()).astype(dtype), lengths, np.ones(len(lengths), np.int64))


def tokens(directory: Path) -> dict[str, Any]:
    write_tokens(directory / "a", 0)
    return {"source": "tokens", "paths": [str(directory / "a")], "document_mask": True, "split": "90,10,0"}


def megatron(directory: Path) -> dict[str, Any]:
    write_tokens(directory / "a", 0)
    return {"source": "tokens", "paths": [str(directory / "a.bin")], "order": "megatron"}


def blend(directory: Path) -> dict[str, Any]:
    write_tokens(directory / "a", 0)
    write_tokens(directory / "b1", 1, "int32")
    write_tokens(directory / "b2", 2, "int32")
    paths = [str(directory / "a"), str(directory / "b*")]
    return {"source": "tokens", "paths": paths, "weights": [0.3, 0.7], "validation_fraction": 0.1}


def arrow(directory: Path) -> dict[str, Any]:
    columns = {"input_ids": "int32", "position_ids": "int32"}
    rng = np.random.RandomState(0)
    with ArrowDatasetWriter(directory / "set", columns) as writer:
        for rows in (100, 57, 200):
            positions = np.tile(np.arange(SEQ_LEN, dtype=np.int32) % 7, (rows, 1))
            ids = rng.randint(0, VOCAB, (rows, SEQ_LEN)).astype(np.int32)
            writer.add({"input_ids": ids, "position_ids": positions})
    return {"source": "arrow", "paths": [str(directory / "set")], "document_mask": True, "validation_fraction": 0.1}


def hdf5(directory: Path) -> dict[str, Any]:
    rng = np.random.RandomState(0)
    for file, count in enumerate((150, 90)):
        samples = np.zeros(count, record_dtype(SEQ_LEN, 4, 128))
        samples["tokens"], samples["labels"] = rng.randint(4, 128, (count, SEQ_LEN)), rng.randint(4, 128, (count, 4))
        samples["masked_positions"], samples["attention_mask"] = [1, 3, 5, 7], 0xFF
        samples["next_sentence_labels"] = rng.randint(0, 2, count)
        write_samples(directory / f"x_training_{file:05}.hdf5", [samples], BertShape(count, SEQ_LEN, 4))
    return {"source": "hdf5", "paths": [str(directory / "*_training_*.hdf5")], "max_predictions": 4}


def text(directory: Path) -> dict[str, Any]:
    """Parquet with several row groups, compressed JSON lines, a text file, and a saved dataset."""
    import datasets

    rng = np.random.RandomState(0)
    texts = ["".join(chr(97 + letter) for letter in rng.randint(0, 26, 300)) for _ in range(100)]
    parquet.write_table(pa.table({"text": texts[:40], "other": [1] * 40}), directory / "a.parquet", row_group_size=9)
    lines = "".join(json.dumps({"text": line}) + "\n" for line in texts[40:70])
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (directory / "c.jsonl").write_text(lines.replace("a", "b"))
    (directory / "d.txt").write_text(texts[70])
    datasets.Dataset.from_dict({"text": texts[71:]}).save_to_disk(directory / "e")
    names = ("a.parquet", "b.jsonl.gz", "c.jsonl", "d.txt", "e")
    return {"source": "text", "paths": [str(directory / name) for name in names], "validation_fraction": 0.1}


FORMATS = {"tokens": tokens, "megatron": megatron, "blend": blend, "arrow": arrow, "hdf5": hdf5, "text": text}


def upload(directory: Path, url: str) -> None:
    filesystem, path = fsspec.core.url_to_fs(url)
    for file in sorted(directory.rglob("*")):
        if file.is_file():
            filesystem.pipe_file(f"{path}/{file.relative_to(directory)}", file.read_bytes())


def moved(data: dict[str, Any], directory: Path, url: str, cache: Path, **cache_keys: Any) -> dict[str, Any]:
    """The same data behind a URL."""
    paths = [path.replace(str(directory), url) for path in data["paths"]]
    return {**data, "paths": paths, "cache": {"directory": str(cache), **cache_keys}}


def make_config(data: dict[str, Any], **sections: Any) -> Config:
    family = "bert" if data["source"] == "hdf5" else "llama"
    train = {"steps": STEPS, "global_batch": GLOBAL_BATCH, "micro_batch": 4}
    return configs.tiny_config(family, data={"seq_len": SEQ_LEN, **data}, train=train, **sections)


def read_batches(config: Config, first_step: int = 0, samples: slice = slice(None)) -> Iterator[Batch]:
    """The batches of a run from a step on, and those of its validation."""
    train, validation, shuffle = build_datasets(config)
    yield from BatchLoader(train, GLOBAL_BATCH, 7, shuffle).prefetch(first_step, STEPS, samples, dict)  # type: ignore[arg-type]
    if validation:
        yield from BatchLoader(validation, GLOBAL_BATCH, 7, shuffle=False).one_epoch(samples)


def assert_same(batches: list[Batch], expected: list[Batch]) -> None:
    assert len(batches) == len(expected)
    for one, other in zip(batches, expected, strict=True):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name])  # type: ignore[literal-required]


def cache_bytes(directory: Path) -> int:
    """Size of all files in a cache, while threads add, rename and remove some."""
    sizes: dict[int, int] = {}
    for file in directory.glob("??/*"):
        with suppress(FileNotFoundError):
            status = file.stat()
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def environment(url: str) -> dict[str, str]:
    """Of a process that reads from the server at this address."""
    settings = json.dumps({"endpoint_url": url, "key": "fake", "secret": "fake"})
    return {**os.environ, "FSSPEC_S3": settings, "OMP_NUM_THREADS": "1"}
