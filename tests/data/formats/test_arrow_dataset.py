"""Arrow datasets: round trips with the datasets library, random access, and one-line errors for damaged files."""

import json
import shutil
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import default_data_collator

from tests.support.examples import examples
from tests.support.file_damage import EDITS, assert_one_line, mutate
from trainyard.core.errors import UserError
from trainyard.data.formats.arrow_dataset import ArrowDataset, data_files
from trainyard.data.loading.token_samples import ContiguousTokens, TokenSamples
from trainyard.prepare import arrow_writer
from trainyard.prepare.arrow_writer import ArrowDatasetWriter

datasets.disable_progress_bars()

COLUMNS = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32", "position_ids": "int32"}
FILE = "data-00000-of-00001.arrow"


def make_rows(count: int, seq_len: int, first_token: int = 0) -> dict[str, np.ndarray]:
    tokens = np.arange(first_token, first_token + count * seq_len, dtype=np.int32).reshape(count, seq_len)
    positions = np.tile(np.arange(seq_len, dtype=np.int32) % 3, (count, 1))
    return {
        "input_ids": tokens,
        "attention_mask": np.ones(tokens.shape, np.int8),
        "labels": tokens,
        "position_ids": positions,
    }


def write(directory: Path, batch_rows: list[int], seq_len: int = 8, shard_bytes: int = 1 << 20) -> np.ndarray:
    """Write record batches of the given numbers of rows; returns the tokens of all rows."""
    batches = [make_rows(count, seq_len, 100 * index) for index, count in enumerate(batch_rows)]
    with patch.object(arrow_writer, "SHARD_BYTES", shard_bytes), ArrowDatasetWriter(directory, COLUMNS) as writer:
        for batch in batches:
            writer.add(batch)
    return np.concatenate([batch["input_ids"] for batch in batches])


def save(directory: Path, columns: dict[str, list], features: object = None, **options: object) -> None:
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(directory, **options)


@pytest.mark.parametrize("shard_bytes", [1, 1500, 1 << 20])
def test_datasets_library_loads_written_directory(tmp_path: Path, shard_bytes: int) -> None:
    tokens = write(tmp_path / "x", [3, 1, 2], shard_bytes=shard_bytes)
    loaded = datasets.load_from_disk(tmp_path / "x")
    assert loaded["input_ids"][:] == tokens.tolist()
    assert loaded["labels"][:] == tokens.tolist()
    assert loaded["attention_mask"][:] == [[1] * 8] * 6
    assert loaded["position_ids"][:] == [[0, 1, 2, 0, 1, 2, 0, 1]] * 6
    assert len(data_files(tmp_path / "x")) == {1: 3, 1500: 2, 1 << 20: 1}[shard_bytes]
    batch = default_data_collator([loaded[0], loaded[5]])
    assert {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in batch.items()} == dict.fromkeys(
        COLUMNS, ("torch.int64", (2, 8))
    )
    loaded.map(lambda row: {"n": len(row["input_ids"])}).save_to_disk(tmp_path / "again")
    assert np.array_equal(ArrowDataset([tmp_path / "again"], 8).samples(np.arange(6))["tokens"], tokens)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "large", "fixed", "narrow", "mixed"])
def test_reads_directory_of_datasets_library(tmp_path: Path, shards: int, kind: str) -> None:
    tokens = np.arange(77).reshape(11, 7)
    value = datasets.Value("uint16" if kind == "narrow" else "int64")
    list_types = {
        "plain": None,
        "large": datasets.LargeList(value),
        "fixed": datasets.List(value, length=7),
        "narrow": datasets.List(value),
        "mixed": datasets.List(value),
    }
    features = list_types[kind] and datasets.Features({"input_ids": list_types[kind], "text": datasets.Value("string")})
    save(tmp_path / "x", {"input_ids": tokens.tolist(), "text": ["x"] * 11}, features, num_shards=shards)
    dataset = ArrowDataset([tmp_path / "x"], 7)
    paths = [tmp_path / "x"]
    if kind == "mixed":  # two directories with integers of different sizes
        save(tmp_path / "y", {"input_ids": tokens.tolist()}, num_shards=shards)
        dataset, tokens = ArrowDataset([*paths, tmp_path / "y"], 7), np.concatenate((tokens, tokens))
    indices = np.random.default_rng(0).permutation(len(dataset))
    sample = dataset.samples(indices)
    assert len(dataset) == len(tokens)
    assert sample["tokens"].dtype == sample["labels"].dtype == np.int32
    assert np.array_equal(sample["tokens"], tokens[indices])
    assert np.array_equal(sample["labels"][:, :-1], tokens[indices][:, 1:])
    assert (sample["labels"][:, -1] == -100).all()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from([1, 1500, 1 << 20]), st.randoms())
@examples(40)
def test_random_access_to_rows(batch_rows: list[int], shard_bytes: int, rng: object) -> None:
    with TemporaryDirectory() as directory:
        tokens = write(Path(directory) / "x", [*batch_rows, 1], 5, shard_bytes)
        dataset = ArrowDataset([Path(directory) / "x"], 5)
        indices = np.array([rng.randrange(len(tokens)) for _ in range(9)])
        assert len(dataset) == len(tokens)
        assert np.array_equal(dataset.samples(indices)["tokens"], tokens[indices])
        for index in (-1, len(tokens)):
            with pytest.raises(IndexError):
                dataset.samples(np.array([0, index]))


def test_ignored_labels_and_padding_have_no_loss(tmp_path: Path) -> None:
    ids = [[1, 2, 3, 4], [5, 6, 7, 0]]
    save(tmp_path / "labels", {"input_ids": ids, "labels": [[-100, -100, 3, 4], [5, 6, 7, -100]]})
    assert ArrowDataset([tmp_path / "labels"], 4).samples(np.arange(2))["labels"].tolist() == [
        [-100, 3, 4, -100],
        [6, 7, -100, -100],
    ]
    save(tmp_path / "attention_mask", {"input_ids": ids, "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 0]]})
    assert ArrowDataset([tmp_path / "attention_mask"], 4).samples(np.arange(2))["labels"].tolist() == [
        [2, 3, 4, -100],
        [6, 7, -100, -100],
    ]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 9))
@examples(30)
def test_document_mask_equals_that_of_token_files(lengths: list[int], seq_len: int) -> None:
    ends = np.cumsum(lengths)
    tokens = np.arange(ends[-1] + seq_len + 1, dtype=np.int32)
    starts = np.append(ends - lengths, ends[-1])
    samples = TokenSamples(ContiguousTokens("x", tokens, starts), seq_len, 1000, document_mask=True)
    num_samples = len(tokens) // seq_len - 1
    expected = samples.samples(np.arange(num_samples))
    if not len(expected["tokens"]):
        return
    mask = np.ones(expected["tokens"].shape, np.int8)
    columns = {"input_ids": expected["tokens"], "labels": expected["tokens"], "attention_mask": mask}
    with TemporaryDirectory() as directory:
        with ArrowDatasetWriter(Path(directory) / "x", COLUMNS) as writer:
            writer.add({**columns, "position_ids": expected["position_ids"]})
        sample = ArrowDataset([Path(directory) / "x"], seq_len, True).samples(np.arange(num_samples))
        assert sample.keys() == expected.keys()
        for name in ("tokens", "document_ids", "position_ids"):
            assert np.array_equal(sample[name], expected[name])
        assert np.array_equal(sample["labels"][:, :-1], expected["labels"][:, :-1])


def test_opening_and_reading_copy_only_the_requested_rows(tmp_path: Path) -> None:
    with ArrowDatasetWriter(tmp_path / "x", COLUMNS) as writer:
        for _ in range(20):
            writer.add(make_rows(64, 2048))
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    dataset = ArrowDataset([tmp_path / "x"], 2048)
    dataset.samples(np.array([5, 700]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(dataset) * 2048 * 13 > 30 << 20
    assert peak < 1 << 20
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_interrupted_writer_leaves_nothing(tmp_path: Path) -> None:
    def fail(overwrite: bool) -> None:
        with ArrowDatasetWriter(tmp_path / "x", COLUMNS, overwrite) as writer:
            writer.add(make_rows(3, 8))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail(False)
    assert list(tmp_path.iterdir()) == []
    tokens = write(tmp_path / "x", [2])
    with pytest.raises(KeyboardInterrupt):
        fail(True)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert datasets.load_from_disk(tmp_path / "x")["input_ids"][:] == tokens.tolist()


def test_writer_replaces_only_saved_datasets(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", [1])
    with pytest.raises(UserError, match="--overwrite replaces it"):
        ArrowDatasetWriter(tmp_path / "empty", COLUMNS)
    with ArrowDatasetWriter(tmp_path / "empty", COLUMNS, overwrite=True) as writer:
        writer.add(make_rows(4, 8))
    assert len(datasets.load_from_disk(tmp_path / "empty")) == 4
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("dear")
    for name in ("mine", "file"):
        with pytest.raises(UserError, match="choose another name"):
            ArrowDatasetWriter(tmp_path / name, COLUMNS, overwrite=True)
    with pytest.raises(UserError, match="not a writable directory"):
        ArrowDatasetWriter(tmp_path / "nowhere" / "x", COLUMNS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "mine"]


def test_fingerprint_depends_on_content(tmp_path: Path) -> None:
    fingerprints = []
    for name, batches in (("a", [2, 1]), ("b", [2, 1]), ("c", [1, 2])):
        write(tmp_path / name, batches)
        fingerprints.append(json.loads((tmp_path / name / "state.json").read_text())["_fingerprint"])
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def assert_refused(message: str, *paths: Path, seq_len: int = 8, **options: object) -> None:
    with pytest.raises(UserError, match=message) as caught:
        ArrowDataset(paths, seq_len, **options).samples(np.array([0]))
    assert "\n" not in str(caught.value)


def test_wrong_row_length_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x", [3])
    assert_refused(r"rows of 8 tokens, but data\.seq_len=4096; nearest: 8", tmp_path / "x", seq_len=4096)
    assert_refused("nearest: 8", tmp_path / "x", seq_len=4)
    save(tmp_path / "y", {"input_ids": [[1, 2], [3]]})
    assert_refused("rows of 1 to 2 tokens; pack them", tmp_path / "y", seq_len=2)
    save(tmp_path / "z", {"input_ids": [[1, 2]], "labels": [[1]]})
    assert_refused("nearest: 1", tmp_path / "z", seq_len=2)


def test_unsupported_directories_and_columns_are_refused(tmp_path: Path) -> None:
    row = [list(range(8))]
    assert_refused("no such directory", tmp_path / "nowhere")
    assert_refused("has no state.json", tmp_path)
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"input_ids": row})}).save_to_disk(tmp_path / "dict")
    assert_refused(r"has splits; use one of: .*/dict/train", tmp_path / "dict")
    assert len(ArrowDataset([tmp_path / "dict" / "train"], 8)) == 1
    for name, columns, message in (
        ("text", {"text": ["x"]}, "no column 'input_ids'; has: text"),
        ("word", {"input_ids": [3]}, "'input_ids' is int32; expected a list"),
        ("real", {"input_ids": [[0.5] * 8]}, "expected a list of integers"),
        ("class", {"input_ids": row, "labels": [1]}, "column 'labels' is int64"),
        ("null", {"input_ids": [*row, None]}, "missing"),
        ("hole", {"input_ids": [[1, None] * 4]}, "missing"),
        ("negative", {"input_ids": [[-1] * 8]}, "token -1 in row 0"),
        ("label", {"input_ids": row, "labels": [[-1] * 8]}, "token -1 in row 0"),
    ):
        save(tmp_path / name, columns)
        assert_refused(message, tmp_path / name)
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int64"))})
    save(tmp_path / "large", {"input_ids": [[2**31] * 8]}, features)
    assert_refused("token 2147483648 in row 0", tmp_path / "large")
    save(tmp_path / "plain", {"input_ids": row})
    assert_refused("token 7 in row 0, but tokens are 0 to 6", tmp_path / "plain", vocab_size=7)
    assert_refused("no column 'position_ids'.*data.document_mask=false", tmp_path / "plain", document_mask=True)
    write(tmp_path / "ours", [1])
    assert_refused("has input_ids, labels, but .* input_ids", tmp_path / "plain", tmp_path / "ours")
    save(tmp_path / "none", {"input_ids": []}, features)
    assert_refused("has no rows", tmp_path / "none")


def test_incomplete_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "x", [3, 3], shard_bytes=1)
    second = tmp_path / "x" / "data-00001-of-00002.arrow"
    content = second.read_bytes()
    for length in (0, 4, 100, len(content) - 8, len(content) - 1):
        second.write_bytes(content[:length])
        assert_refused("truncated", tmp_path / "x")
    second.write_bytes(content + content)
    assert_refused("bytes early", tmp_path / "x")
    second.unlink()
    assert_refused("names 'data-00001-of-00002.arrow', which is not in", tmp_path / "x")
    for state in ("", "{", "[]", '{"_data_files": 3}', '{"_data_files": [{}]}', "[" * 100_000):
        (tmp_path / "x" / "state.json").write_text(state)
        assert_refused("has no list of data files", tmp_path / "x")
    (tmp_path / "x" / "state.json").write_text('{"_data_files": [{"filename": "../secret"}]}')
    assert_refused("names '../secret'", tmp_path / "x")


def test_compressed_stream_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "x", {"input_ids": [list(range(8))] * 100})
    path = tmp_path / "x" / FILE
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(str(path), table.schema, options=options) as stream:
        stream.write_table(table)
    assert_refused("is compressed", tmp_path / "x")


@pytest.fixture(scope="module")
def saved_directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A saved dataset of each kind, for a test to damage."""
    root = tmp_path_factory.mktemp("saved")
    tokens = np.arange(40).reshape(5, 8).tolist()
    write(root / "ours", [3, 2])
    save(root / "theirs", {"input_ids": tokens, "labels": tokens, "text": ["a", "", "b", "c", "d"]})
    types = {"input_ids": datasets.List(datasets.Value("int32"), length=8)}
    types["labels"] = datasets.LargeList(datasets.Value("int64"))
    save(root / "fixed", {"input_ids": tokens, "labels": tokens}, datasets.Features(types))
    return [root / "ours", root / "theirs", root / "fixed"]


@given(
    st.integers(0, 2),
    st.sampled_from([FILE, FILE, FILE, "state.json", "dataset_info.json"]),
    st.one_of(EDITS, EDITS, EDITS, st.binary(max_size=300)),
)
@examples(250)
def test_damaged_files_are_refused_or_read_like_pyarrow(
    saved_directories: list[Path], which: int, file: str, damage: object
) -> None:
    with TemporaryDirectory() as directory:
        copy = Path(directory) / "x"
        shutil.copytree(saved_directories[which], copy)
        content = (copy / file).read_bytes()
        (copy / file).write_bytes(damage if isinstance(damage, bytes) else mutate(content, damage))
        try:
            dataset = ArrowDataset([copy], 8)
            sample = dataset.samples(np.arange(len(dataset)))
        except UserError as error:
            assert_one_line(error)
            return
        table = pa.ipc.open_stream(pa.memory_map(str(copy / FILE))).read_all()
        assert sample["tokens"].tolist() == table.column("input_ids").to_pylist()
