"""BERT's HDF5 files: same samples as the reference loader, one cache for all processes, damage refused or harmless."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.examples import examples
from trainyard.core.errors import UserError
from trainyard.data.formats.bert_hdf5 import BertShape, record_dtype, write_samples
from trainyard.data.formats.bert_hdf5_cache import CACHE_DIRECTORY, BertHdf5Dataset
from trainyard.data.loading.loader import BatchLoader

SEQ_LEN, PREDICTIONS, VOCAB = 16, 4, 3000
Arrays = dict[str, NDArray[Any]]


@pytest.fixture(autouse=True)
def _private_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def arrays(samples: int, seed: int = 0, vocab: int = VOCAB) -> Arrays:
    """Samples in the reference format: between no and PREDICTIONS masked positions."""
    rng = np.random.default_rng(seed)
    position, length = np.arange(SEQ_LEN), rng.integers(6, SEQ_LEN + 1, (samples, 1))
    used = position < length
    masked = np.sort(rng.permuted(np.tile(position[1:5], (samples, 1)), axis=1), axis=1)
    masked[np.arange(PREDICTIONS) >= rng.integers(0, PREDICTIONS + 1, (samples, 1))] = 0
    return {
        "input_ids": (rng.integers(1, vocab, (samples, SEQ_LEN)) * used).astype("i4"),
        "input_mask": used.astype("i1"),
        "segment_ids": (used & (position > length // 2)).astype("i1"),
        "masked_lm_positions": masked.astype("i4"),
        "masked_lm_ids": np.where(masked > 0, rng.integers(1, vocab, masked.shape), 0).astype("i4"),
        "next_sentence_labels": rng.integers(0, 2, samples).astype("i1"),
    }


def save(path: Path, content: Arrays, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in content.items():
            file.create_dataset(name, data=array, **{"compression": "gzip", **options})
    return path


def reference_load(paths: list[Path]) -> Arrays:
    """Samples as the reference loader returns them: a label for each token."""
    rows: dict[str, list[Any]] = {
        "tokens": [],
        "segment_ids": [],
        "attention_mask": [],
        "labels": [],
        "next_sentence_labels": [],
    }
    for path in paths:
        with h5py.File(path) as file:
            content = {name: file[name][:] for name in file}
        for index in range(len(content["input_ids"])):
            labels = np.full(SEQ_LEN, -100)
            positions = content["masked_lm_positions"][index]
            zeros = np.flatnonzero(positions == 0)
            count = zeros[0] if len(zeros) else len(positions)
            labels[positions[:count]] = content["masked_lm_ids"][index][:count]
            rows["tokens"].append(content["input_ids"][index])
            rows["segment_ids"].append(content["segment_ids"][index])
            rows["attention_mask"].append(content["input_mask"][index])
            rows["labels"].append(labels)
            rows["next_sentence_labels"].append(content["next_sentence_labels"][index])
    return {name: np.stack(arrays) for name, arrays in rows.items()}


def with_dense_labels(batch: dict[str, NDArray[np.int32]]) -> Arrays:
    """The batch with a label for each token instead of labels at `masked_positions`."""
    labels = np.full(batch["tokens"].shape, -100)
    for row, (positions, values) in enumerate(zip(batch["masked_positions"], batch["labels"], strict=True)):
        assert ((values == -100) == (positions == 0)).all()
        labels[row, positions[positions > 0]] = values[positions > 0]
    return {
        **{name: batch[name] for name in ("tokens", "segment_ids", "attention_mask", "next_sentence_labels")},
        "labels": labels,
    }


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, None),
        ({"chunks": None, "compression": None}, "i8"),
        ({"shuffle": True}, "u8"),
        ({"fletcher32": True}, "i4"),
    ],
)
def test_samples_equal_those_of_the_reference_loader(
    tmp_path: Path, options: dict[str, Any], dtype: str | None
) -> None:
    paths = []
    for number in range(3):
        content = arrays(50 + number, number)
        content = {name: array.astype(dtype or array.dtype) for name, array in content.items()}
        paths.append(save(tmp_path / f"x_training_{number}.hdf5", {**content, "extra": np.zeros(3)}, **options))
    dataset = BertHdf5Dataset(paths, SEQ_LEN, PREDICTIONS)
    expected = reference_load(paths)
    assert len(dataset) == 153
    indices = np.random.default_rng(1).integers(0, 153, 400)
    batch = dataset.samples(indices)
    assert all(array.dtype == np.int32 for array in batch.values())
    assert same(with_dense_labels(batch), {name: array[indices] for name, array in expected.items()})
    assert dataset.vocab_size == max(expected["tokens"].max(), expected["labels"].max()) + 1


def test_large_vocabulary_and_more_predictions_than_in_the_file(tmp_path: Path) -> None:
    path = save(tmp_path / "x.hdf5", arrays(20, vocab=200_000))
    batch = BertHdf5Dataset([path], SEQ_LEN, 7).samples(np.arange(20))
    assert batch["masked_positions"].shape == batch["labels"].shape == (20, 7)
    assert same(with_dense_labels(batch), reference_load([path]))


def test_position_zero_ends_the_list_of_predictions(tmp_path: Path) -> None:
    content = arrays(1)
    content["masked_lm_positions"][0], content["masked_lm_ids"][0] = [3, 0, 5, 6], [10, 11, 12, 13]
    batch = BertHdf5Dataset([save(tmp_path / "x.hdf5", content)], SEQ_LEN, PREDICTIONS).samples(np.arange(1))
    assert batch["masked_positions"].tolist() == [[3, 0, 0, 0]]
    assert batch["labels"].tolist() == [[10, -100, -100, -100]]


def test_written_samples_are_read_back(tmp_path: Path) -> None:
    records = np.zeros(2000, record_dtype(512, 80, VOCAB))
    rng = np.random.default_rng(0)
    records["tokens"], records["labels"] = rng.integers(1, VOCAB, (2000, 512)), rng.integers(1, VOCAB, (2000, 80))
    records["masked_positions"] = np.arange(1, 81)
    records["attention_mask"], records["next_sentence_labels"] = 255, rng.integers(0, 2, 2000)
    blocks = np.split(records, [1, 1, 700, 701, 1500])
    write_samples(tmp_path / "x.hdf5", iter(blocks), BertShape(2000, 512, 80))
    with h5py.File(tmp_path / "x.hdf5") as file:
        assert np.array_equal(file["input_ids"][:], records["tokens"])
        assert np.array_equal(file["masked_lm_ids"][:], records["labels"])
    batch = BertHdf5Dataset([tmp_path / "x.hdf5"], 512, 80).samples(np.arange(2000))
    for name in ("tokens", "labels", "masked_positions", "next_sentence_labels"):
        assert np.array_equal(batch[name], records[name])
    assert batch["attention_mask"].all()
    assert not batch["segment_ids"].any()


def test_cache_is_built_once_and_again_when_a_file_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = save(tmp_path / "x.hdf5", arrays(30))
    for _ in range(2):
        BertHdf5Dataset([path], SEQ_LEN, PREDICTIONS)
    assert len([line for line in caplog.messages if "unpacking" in line]) == 1
    save(path, arrays(31, 5))
    assert same(
        with_dense_labels(BertHdf5Dataset([path], SEQ_LEN, PREDICTIONS).samples(np.arange(31))), reference_load([path])
    )
    assert len(list((tmp_path / CACHE_DIRECTORY).glob("*.pairs"))) == 1  # the cache of the old file is removed


def test_cache_footer_keeps_its_format(tmp_path: Path) -> None:
    BertHdf5Dataset([save(tmp_path / "x.hdf5", arrays(30))], SEQ_LEN, PREDICTIONS)
    (cache,) = (tmp_path / CACHE_DIRECTORY).glob("*.pairs")
    content = cache.read_bytes()
    assert content[-8:] == b"TYPAIRS1"
    footer = json.loads(content[-16 - int.from_bytes(content[-16:-8], "little") : -16])
    assert set(footer) == {"files", "samples", "sequence", "predictions", "vocab"}
    assert (footer["samples"], footer["sequence"], footer["predictions"]) == (30, SEQ_LEN, PREDICTIONS)


@pytest.mark.parametrize("damage", ["truncated", "longer", "empty", "not JSON"])
def test_damaged_cache_is_rebuilt(tmp_path: Path, damage: str) -> None:
    path = save(tmp_path / "x.hdf5", arrays(30))
    BertHdf5Dataset([path], SEQ_LEN, PREDICTIONS)
    (cache,) = (tmp_path / CACHE_DIRECTORY).glob("*.pairs")
    content = cache.read_bytes()
    cache.write_bytes(
        {
            "truncated": content[:-5],
            "longer": bytes(100) + content,
            "empty": b"",
            "not JSON": content[:-20] + b"xxxx" + content[-16:],
        }[damage]
    )
    assert same(
        with_dense_labels(BertHdf5Dataset([path], SEQ_LEN, PREDICTIONS).samples(np.arange(30))), reference_load([path])
    )
    assert cache.read_bytes() == content


def test_cache_goes_to_the_home_directory_if_the_data_is_read_only(tmp_path: Path) -> None:
    path = save(tmp_path / "x.hdf5", arrays(30))
    (tmp_path / CACHE_DIRECTORY).write_text("in the way")
    for _ in range(2):
        assert len(BertHdf5Dataset([path], SEQ_LEN, PREDICTIONS)) == 30
    assert len(list((tmp_path / "cache").rglob("*.pairs"))) == 1


def test_cache_moves_with_its_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "here").mkdir()
    path = save(tmp_path / "here" / "x.hdf5", arrays(30))
    BertHdf5Dataset([path], SEQ_LEN, PREDICTIONS)
    caplog.clear()
    moved = path.parent.rename(tmp_path / "there") / "x.hdf5"
    BertHdf5Dataset([moved], SEQ_LEN, PREDICTIONS)
    assert not caplog.messages


def test_processes_that_start_together_build_one_cache(tmp_path: Path) -> None:
    paths = [save(tmp_path / f"{number}.hdf5", arrays(20_000, number)) for number in range(2)]
    program = (
        "import sys, logging, zlib, numpy as np; from pathlib import Path\n"
        "from trainyard.data.formats.bert_hdf5_cache import BertHdf5Dataset\n"
        "logging.basicConfig(level=logging.INFO)\n"
        f"dataset = BertHdf5Dataset([Path(name) for name in sys.argv[1:]], {SEQ_LEN}, {PREDICTIONS})\n"
        "print(zlib.crc32(dataset.samples(np.arange(40_000))['tokens'].tobytes()))\n"
    )
    command = [sys.executable, "-c", program, *map(str, paths)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(4)]
    results = [process.communicate(timeout=240) for process in processes]
    assert len({checksum for checksum, _ in results}) == 1
    assert sum(log.count("unpacking 2") for _, log in results) == 1
    assert sorted(path.suffix for path in (tmp_path / CACHE_DIRECTORY).iterdir()) == ["", ".pairs"]


def test_ranks_share_the_global_batch(tmp_path: Path) -> None:
    dataset = BertHdf5Dataset([save(tmp_path / "x.hdf5", arrays(37))], SEQ_LEN, PREDICTIONS)
    loader = BatchLoader(dataset, 8, seed=3)
    for step in (0, 5):
        whole = loader.batch(step)
        for ranks in (1, 2, 4):
            share = 8 // ranks
            parts = [loader.batch(step, slice(rank * share, (rank + 1) * share)) for rank in range(ranks)]
            for name, tensor in whole.items():
                assert torch.equal(tensor, torch.cat([part[name] for part in parts]))


def with_value(name: str, index: Any, value: Any) -> Arrays:
    content = arrays(30)
    content[name][index] = value
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {name: array for name, array in arrays(3).items() if name != "segment_ids"},
            "no dataset segment_ids; has: inp",
        ),
        ({**arrays(30), "input_mask": arrays(29)["input_mask"]}, r"input_mask: has shape \(29, 16\)"),
        ({**arrays(30), "masked_lm_ids": arrays(30)["masked_lm_ids"][:, :3]}, "masked_lm_ids: has shape"),
        ({**arrays(30), "next_sentence_labels": np.zeros((30, 1), "i1")}, r"next_sentence_labels.*expected \[N\]"),
        ({**arrays(30), "input_ids": np.zeros((30, 16))}, "input_ids: not a dataset of integers"),
        (with_value("input_ids", (7, 3), -1), "input_ids: sample 7 has -1; expected 0"),
        (with_value("input_ids", (7, 3), 2**30), "input_ids: sample 7 has 1073741824"),
        (with_value("input_mask", (8, 0), 2), "input_mask: sample 8 has 2; expected 0 to 1"),
        (with_value("segment_ids", (9, 0), -3), "segment_ids: sample 9 has -3"),
        (with_value("next_sentence_labels", 4, 5), "next_sentence_labels: sample 4 has 5"),
        (with_value("masked_lm_positions", (5, 0), SEQ_LEN), "masked_lm_positions: sample 5 has 16; expected 0 to 15"),
        (
            with_value("masked_lm_positions", (5, slice(0, 2)), 3),
            "masked_lm_positions: sample 5 has the same position twice",
        ),
        (with_value("masked_lm_ids", (5, 0), -7), "masked_lm_ids: sample 5 has -7"),
        (arrays(0), "no samples"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, content: Arrays, message: str) -> None:
    path = save(tmp_path / "x.hdf5", content, **({} if len(content.get("input_ids", [])) else {"compression": None}))
    with pytest.raises(UserError, match=message) as caught:
        BertHdf5Dataset([path], SEQ_LEN, PREDICTIONS)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.pairs")) + list(tmp_path.rglob("*.part"))


def test_files_that_do_not_fit_the_configuration_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x.hdf5", arrays(30))
    for _ in range(2):  # without a cache and with one
        with pytest.raises(UserError, match=r"16 tokens, but data.seq_len=32; nearest: 16"):
            BertHdf5Dataset([path], 32, PREDICTIONS)
        with pytest.raises(UserError, match=r"4 masked positions.*data.max_predictions=2; nearest: 4"):
            BertHdf5Dataset([path], SEQ_LEN, 2)
        BertHdf5Dataset([path], SEQ_LEN, PREDICTIONS)
    with pytest.raises(UserError, match="No such file"):
        BertHdf5Dataset([tmp_path / "nowhere.hdf5"], SEQ_LEN, PREDICTIONS)


def test_missing_chunks_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x.hdf5", arrays(30))
    with h5py.File(path, "a") as file:
        del file["segment_ids"]
        file.create_dataset("segment_ids", (30, SEQ_LEN), "i1", chunks=(10, SEQ_LEN))[:10] = 0
    with pytest.raises(UserError, match="segment_ids: some of its data is missing"):
        BertHdf5Dataset([path], SEQ_LEN, PREDICTIONS)


@pytest.fixture(scope="module")
def complete_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, Arrays]:
    """A directory, the bytes of a written file, and its samples."""
    directory = tmp_path_factory.mktemp("damaged")
    path = directory / "complete.hdf5"
    content = arrays(40)
    records = np.zeros(40, record_dtype(SEQ_LEN, PREDICTIONS, VOCAB))
    records["tokens"], records["next_sentence_labels"] = content["input_ids"], content["next_sentence_labels"]
    records["masked_positions"], records["labels"] = content["masked_lm_positions"], content["masked_lm_ids"]
    records["attention_mask"] = np.packbits(content["input_mask"].astype(bool), axis=1)
    records["segment_ids"] = np.packbits(content["segment_ids"].astype(bool), axis=1)
    write_samples(path, [records], BertShape(40, SEQ_LEN, PREDICTIONS))
    return directory, path.read_bytes(), reference_load([path])


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_file_is_refused_or_read_correctly(
    complete_file: tuple[Path, bytes, Arrays], data: st.DataObject
) -> None:
    directory, original, expected = complete_file
    content = bytearray(original)
    damage = data.draw(st.sampled_from(["flipped", "flipped", "truncated", "random", "overwritten"]))
    if damage == "flipped":
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif damage == "truncated":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif damage == "overwritten":
        start = data.draw(st.integers(0, len(content) - 1))
        content[start : start + 40] = data.draw(st.binary(min_size=1, max_size=40))
    else:
        content = bytearray(data.draw(st.sampled_from([b"", original[:8]])) + data.draw(st.binary(max_size=300)))
    path = directory / "damaged.hdf5"
    path.write_bytes(content)
    os.utime(path, ns=(0, data.draw(st.integers(1, 2**60))))
    try:
        dataset = BertHdf5Dataset([path], SEQ_LEN, PREDICTIONS)
    except UserError as error:
        message = str(error)
    else:
        assert same(with_dense_labels(dataset.samples(np.arange(len(dataset)))), expected)
        return
    assert "\n" not in message
    assert str(path) in message
