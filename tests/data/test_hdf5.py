"""BERT's HDF5 files: read as the reference reads them, unpacked once by whoever comes first, and never trusted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainyard.core.errors import UserError
from trainyard.data.formats.bert_hdf5 import BertShape, record_dtype, write_samples
from trainyard.data.formats.bert_hdf5_cache import CACHE_DIRECTORY, BertHdf5Dataset
from trainyard.data.loading.loader import BatchLoader

SEQUENCE, PREDICTIONS, VOCAB = 16, 4, 3000
Arrays = dict[str, NDArray[Any]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def arrays(samples: int, seed: int = 0, vocab: int = VOCAB) -> Arrays:
    """Samples as the reference's tools make them: some with a full list of places, some with none."""
    draw = np.random.default_rng(seed)
    at, length = np.arange(SEQUENCE), draw.integers(6, SEQUENCE + 1, (samples, 1))
    used = at < length
    places = np.sort(draw.permuted(np.tile(at[1:5], (samples, 1)), axis=1), axis=1)
    places[np.arange(PREDICTIONS) >= draw.integers(0, PREDICTIONS + 1, (samples, 1))] = 0
    return {
        "input_ids": (draw.integers(1, vocab, (samples, SEQUENCE)) * used).astype("i4"),
        "input_mask": used.astype("i1"),
        "segment_ids": (used & (at > length // 2)).astype("i1"),
        "masked_lm_positions": places.astype("i4"),
        "masked_lm_ids": np.where(places > 0, draw.integers(1, vocab, places.shape), 0).astype("i4"),
        "next_sentence_labels": draw.integers(0, 2, samples).astype("i1"),
    }


def save(path: Path, found: Arrays, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in found.items():
            file.create_dataset(name, data=array, **{"compression": "gzip", **options})
    return path


def plainly(paths: list[Path]) -> Arrays:
    """As the reference's loader does it: a row of labels for all tokens."""
    rows: dict[str, list[Any]] = {"tokens": [], "segment_ids": [], "attention_mask": [], "labels": [], "next_sentence_labels": []}
    for path in paths:
        with h5py.File(path) as file:
            found = {name: file[name][:] for name in file}
        for number in range(len(found["input_ids"])):
            labels = np.full(SEQUENCE, -100)
            places = found["masked_lm_positions"][number]
            zeros = np.flatnonzero(places == 0)
            count = zeros[0] if len(zeros) else len(places)
            labels[places[:count]] = found["masked_lm_ids"][number][:count]
            rows["tokens"].append(found["input_ids"][number])
            rows["segment_ids"].append(found["segment_ids"][number])
            rows["attention_mask"].append(found["input_mask"][number])
            rows["labels"].append(labels)
            rows["next_sentence_labels"].append(found["next_sentence_labels"][number])
    return {name: np.stack(each) for name, each in rows.items()}


def as_plain(batch: dict[str, NDArray[np.int32]]) -> Arrays:
    """Labels at places, as labels of all tokens."""
    labels = np.full(batch["tokens"].shape, -100)
    for row, (places, here) in enumerate(zip(batch["masked_positions"], batch["labels"], strict=True)):
        assert ((here == -100) == (places == 0)).all()
        labels[row, places[places > 0]] = here[places > 0]
    return {**{name: batch[name] for name in ("tokens", "segment_ids", "attention_mask", "next_sentence_labels")}, "labels": labels}


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
def test_files_are_read_as_the_reference_reads_them(tmp_path: Path, options: dict[str, Any], dtype: str | None) -> None:
    paths = []
    for number in range(3):
        found = arrays(50 + number, number)
        found = {name: array.astype(dtype or array.dtype) for name, array in found.items()}
        paths.append(save(tmp_path / f"x_training_{number}.hdf5", {**found, "extra": np.zeros(3)}, **options))
    source = BertHdf5Dataset(paths, SEQUENCE, PREDICTIONS)
    wanted = plainly(paths)
    assert len(source) == 153
    numbers = np.random.default_rng(1).integers(0, 153, 400)
    batch = source.samples(numbers)
    assert all(array.dtype == np.int32 for array in batch.values())
    assert same(as_plain(batch), {name: array[numbers] for name, array in wanted.items()})
    assert source.vocab_size == max(wanted["tokens"].max(), wanted["labels"].max()) + 1


def test_large_vocabularies_and_more_places_than_the_file_has(tmp_path: Path) -> None:
    path = save(tmp_path / "x.hdf5", arrays(20, vocab=200_000))
    batch = BertHdf5Dataset([path], SEQUENCE, 7).samples(np.arange(20))
    assert batch["masked_positions"].shape == batch["labels"].shape == (20, 7)
    assert same(as_plain(batch), plainly([path]))


def test_what_follows_the_first_zero_does_not_count(tmp_path: Path) -> None:
    found = arrays(1)
    found["masked_lm_positions"][0], found["masked_lm_ids"][0] = [3, 0, 5, 6], [10, 11, 12, 13]
    batch = BertHdf5Dataset([save(tmp_path / "x.hdf5", found)], SEQUENCE, PREDICTIONS).samples(np.arange(1))
    assert batch["masked_positions"].tolist() == [[3, 0, 0, 0]]
    assert batch["labels"].tolist() == [[10, -100, -100, -100]]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    records = np.zeros(5000, record_dtype(512, 80, VOCAB))
    draw = np.random.default_rng(0)
    records["tokens"], records["labels"] = draw.integers(1, VOCAB, (5000, 512)), draw.integers(1, VOCAB, (5000, 80))
    records["masked_positions"] = np.arange(1, 81)
    records["attention_mask"], records["next_sentence_labels"] = 255, draw.integers(0, 2, 5000)
    blocks = np.split(records, [1, 1, 700, 701, 3000])
    write_samples(tmp_path / "x.hdf5", iter(blocks), BertShape(5000, 512, 80))
    with h5py.File(tmp_path / "x.hdf5") as file:
        assert np.array_equal(file["input_ids"][:], records["tokens"])
        assert np.array_equal(file["masked_lm_ids"][:], records["labels"])
    batch = BertHdf5Dataset([tmp_path / "x.hdf5"], 512, 80).samples(np.arange(5000))
    for name in ("tokens", "labels", "masked_positions", "next_sentence_labels"):
        assert np.array_equal(batch[name], records[name])
    assert batch["attention_mask"].all()
    assert not batch["segment_ids"].any()


def test_unpacked_once_and_again_when_a_file_changes(tmp_path: Path) -> None:
    path = save(tmp_path / "x.hdf5", arrays(30))
    lines: list[str] = []
    for _ in range(2):
        BertHdf5Dataset([path], SEQUENCE, PREDICTIONS, lines.append)
    assert len([line for line in lines if "unpacking" in line]) == 1
    save(path, arrays(31, 5))
    assert same(as_plain(BertHdf5Dataset([path], SEQUENCE, PREDICTIONS).samples(np.arange(31))), plainly([path]))
    assert len(list((tmp_path / CACHE_DIRECTORY).glob("*.pairs"))) == 1  # that of the old file is gone


@pytest.mark.parametrize("damage", ["truncated", "longer", "empty", "not JSON"])
def test_a_damaged_copy_is_made_anew(tmp_path: Path, damage: str) -> None:
    path = save(tmp_path / "x.hdf5", arrays(30))
    BertHdf5Dataset([path], SEQUENCE, PREDICTIONS)
    (copy,) = (tmp_path / CACHE_DIRECTORY).glob("*.pairs")
    whole = copy.read_bytes()
    copy.write_bytes(
        {
            "truncated": whole[:-5],
            "longer": bytes(100) + whole,
            "empty": b"",
            "not JSON": whole[:-20] + b"xxxx" + whole[-16:],
        }[damage]
    )
    assert same(as_plain(BertHdf5Dataset([path], SEQUENCE, PREDICTIONS).samples(np.arange(30))), plainly([path]))
    assert copy.read_bytes() == whole


def test_a_directory_that_cannot_be_written_to_is_left_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "x.hdf5", arrays(30))
    (tmp_path / CACHE_DIRECTORY).write_text("in the way")
    for _ in range(2):
        assert len(BertHdf5Dataset([path], SEQUENCE, PREDICTIONS)) == 30
    assert len(list((tmp_path / "cache").rglob("*.pairs"))) == 1


def test_a_copy_moves_with_its_files(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    path = save(tmp_path / "here" / "x.hdf5", arrays(30))
    BertHdf5Dataset([path], SEQUENCE, PREDICTIONS)
    lines: list[str] = []
    moved = path.parent.rename(tmp_path / "there") / "x.hdf5"
    BertHdf5Dataset([moved], SEQUENCE, PREDICTIONS, lines.append)
    assert not lines


def test_ranks_that_start_together_unpack_once(tmp_path: Path) -> None:
    paths = [save(tmp_path / f"{number}.hdf5", arrays(20_000, number)) for number in range(2)]
    program = (
        "import sys, json, zlib, numpy as np; from pathlib import Path\n"
        "from trainyard.data.formats.bert_hdf5_cache import Hdf5Pairs\n"
        "lines = []\n"
        f"source = Hdf5Pairs([Path(name) for name in sys.argv[1:]], {SEQUENCE}, {PREDICTIONS}, lines.append)\n"
        "print(json.dumps([zlib.crc32(source.samples(np.arange(40_000))['tokens'].tobytes()), lines]))\n"
    )
    command = [sys.executable, "-c", program, *map(str, paths)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    results = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert len({checksum for checksum, _ in results}) == 1
    assert sum("unpacking 2" in line for _, lines in results for line in lines) == 1
    assert sorted(path.suffix for path in (tmp_path / CACHE_DIRECTORY).iterdir()) == ["", ".pairs"]


def test_ranks_have_parts_of_the_same_batches(tmp_path: Path) -> None:
    source = BertHdf5Dataset([save(tmp_path / "x.hdf5", arrays(37))], SEQUENCE, PREDICTIONS)
    loader = BatchLoader(source, 8, seed=3)
    for step in (0, 5):
        whole = loader.batch(step)
        for ranks in (1, 2, 4):
            share = 8 // ranks
            parts = [loader.batch(step, slice(rank * share, (rank + 1) * share)) for rank in range(ranks)]
            for name, tensor in whole.items():
                assert torch.equal(tensor, torch.cat([part[name] for part in parts]))


def broken(name: str, place: Any, value: Any) -> Arrays:
    found = arrays(30)
    found[name][place] = value
    return found


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            {name: array for name, array in arrays(3).items() if name != "segment_ids"},
            "no dataset segment_ids; has: inp",
        ),
        ({**arrays(30), "input_mask": arrays(29)["input_mask"]}, r"input_mask: has the shape \(29, 16\)"),
        ({**arrays(30), "masked_lm_ids": arrays(30)["masked_lm_ids"][:, :3]}, "masked_lm_ids: has the shape"),
        ({**arrays(30), "next_sentence_labels": np.zeros((30, 1), "i1")}, r"next_sentence_labels.*wanted: \[N\]"),
        ({**arrays(30), "input_ids": np.zeros((30, 16))}, "input_ids: not a dataset of integers"),
        (broken("input_ids", (7, 3), -1), "input_ids: sample 7 has -1; wanted: from 0"),
        (broken("input_ids", (7, 3), 2**30), "input_ids: sample 7 has 1073741824"),
        (broken("input_mask", (8, 0), 2), "input_mask: sample 8 has 2; wanted: from 0 to 1"),
        (broken("segment_ids", (9, 0), -3), "segment_ids: sample 9 has -3"),
        (broken("next_sentence_labels", 4, 5), "next_sentence_labels: sample 4 has 5"),
        (broken("masked_lm_positions", (5, 0), SEQUENCE), "masked_lm_positions: sample 5 has 16; wanted: from 0 to 15"),
        (broken("masked_lm_positions", (5, slice(0, 2)), 3), "masked_lm_positions: sample 5 has the same place twice"),
        (broken("masked_lm_ids", (5, 0), -7), "masked_lm_ids: sample 5 has -7"),
        (arrays(0), "no samples"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, found: Arrays, words: str) -> None:
    path = save(tmp_path / "x.hdf5", found, **({} if len(found.get("input_ids", [])) else {"compression": None}))
    with pytest.raises(UserError, match=words) as caught:
        BertHdf5Dataset([path], SEQUENCE, PREDICTIONS)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.pairs")) + list(tmp_path.rglob("*.part"))


def test_what_does_not_fit_the_configuration_is_said(tmp_path: Path) -> None:
    path = save(tmp_path / "x.hdf5", arrays(30))
    for _ in range(2):  # before there is a copy and with one
        with pytest.raises(UserError, match=r"16 tokens, but data.seq_len=32; nearest: 16"):
            BertHdf5Dataset([path], 32, PREDICTIONS)
        with pytest.raises(UserError, match=r"4 masked places.*data.max_predictions=2; nearest: 4"):
            BertHdf5Dataset([path], SEQUENCE, 2)
        BertHdf5Dataset([path], SEQUENCE, PREDICTIONS)
    with pytest.raises(UserError, match="No such file"):
        BertHdf5Dataset([tmp_path / "nowhere.hdf5"], SEQUENCE, PREDICTIONS)


def test_parts_that_were_never_written_are_missed(tmp_path: Path) -> None:
    path = save(tmp_path / "x.hdf5", arrays(30))
    with h5py.File(path, "a") as file:
        del file["segment_ids"]
        file.create_dataset("segment_ids", (30, SEQUENCE), "i1", chunks=(10, SEQUENCE))[:10] = 0
    with pytest.raises(UserError, match="segment_ids: parts of it are missing"):
        BertHdf5Dataset([path], SEQUENCE, PREDICTIONS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, Arrays]:
    """Where to put files, the bytes of one of ours, and what is in it."""
    where = tmp_path_factory.mktemp("damaged")
    path = where / "whole.hdf5"
    found = arrays(40)
    records = np.zeros(40, record_dtype(SEQUENCE, PREDICTIONS, VOCAB))
    records["tokens"], records["next_sentence_labels"] = found["input_ids"], found["next_sentence_labels"]
    records["masked_positions"], records["labels"] = found["masked_lm_positions"], found["masked_lm_ids"]
    records["attention_mask"] = np.packbits(found["input_mask"].astype(bool), axis=1)
    records["segment_ids"] = np.packbits(found["segment_ids"].astype(bool), axis=1)
    write_samples(path, [records], BertShape(40, SEQUENCE, PREDICTIONS))
    return where, path.read_bytes(), plainly([path])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_rightly(whole: tuple[Path, bytes, Arrays], data: st.DataObject) -> None:
    where, original, wanted = whole
    content = bytearray(original)
    how = data.draw(st.sampled_from(["flipped", "flipped", "truncated", "random", "overwritten"]))
    if how == "flipped":
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "truncated":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif how == "overwritten":
        start = data.draw(st.integers(0, len(content) - 1))
        content[start : start + 40] = data.draw(st.binary(min_size=1, max_size=40))
    else:
        content = bytearray(data.draw(st.sampled_from([b"", original[:8]])) + data.draw(st.binary(max_size=300)))
    path = where / "damaged.hdf5"
    path.write_bytes(content)
    os.utime(path, ns=(0, data.draw(st.integers(1, 2**60))))
    try:
        source = BertHdf5Dataset([path], SEQUENCE, PREDICTIONS)
    except UserError as error:
        line = str(error)
    else:
        assert same(as_plain(source.samples(np.arange(len(source)))), wanted)
        return
    assert "\n" not in line
    assert str(path) in line
