"""Saved data sets: the datasets library reads ours, we read its, any row at once, and damage is named in one line."""

import json
import shutil
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import default_data_collator

from tests.data.file_damage import EDITS, in_one_line, mutate
from trainyard.core.errors import UserError
from trainyard.data.formats.arrow_dataset import ArrowDataset, data_files
from trainyard.data.formats.arrow_writer import ArrowDatasetWriter
from trainyard.data.loading.token_samples import ContiguousTokens, TokenSamples

datasets.disable_progress_bars()

COLUMNS = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32", "position_ids": "int32"}
FILE = "data-00000-of-00001.arrow"


def rows_of(count: int, sequence: int, first: int = 0) -> dict[str, np.ndarray]:
    tokens = np.arange(first, first + count * sequence, dtype=np.int32).reshape(count, sequence)
    positions = np.tile(np.arange(sequence, dtype=np.int32) % 3, (count, 1))
    return {
        "input_ids": tokens,
        "attention_mask": np.ones(tokens.shape, np.int8),
        "labels": tokens,
        "position_ids": positions,
    }


def write(directory: Path, batches: list[int], sequence: int = 8, shard: int = 1 << 20) -> np.ndarray:
    """Batches of so many rows; the tokens of all."""
    made = [rows_of(count, sequence, 100 * number) for number, count in enumerate(batches)]
    with ArrowDatasetWriter(directory, COLUMNS, shard_bytes=shard) as writer:
        for batch in made:
            writer.add(batch)
    return np.concatenate([batch["input_ids"] for batch in made])


def save(directory: Path, columns: dict[str, list], features: object = None, **options: object) -> None:
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(directory, **options)


@pytest.mark.parametrize("shard", [1, 1500, 1 << 20])
def test_the_library_loads_ours(tmp_path: Path, shard: int) -> None:
    tokens = write(tmp_path / "x", [3, 1, 2], shard=shard)
    loaded = datasets.load_from_disk(tmp_path / "x")
    assert loaded["input_ids"][:] == tokens.tolist()
    assert loaded["labels"][:] == tokens.tolist()
    assert loaded["attention_mask"][:] == [[1] * 8] * 6
    assert loaded["position_ids"][:] == [[0, 1, 2, 0, 1, 2, 0, 1]] * 6
    assert len(data_files(tmp_path / "x")) == {1: 3, 1500: 2, 1 << 20: 1}[shard]
    batch = default_data_collator([loaded[0], loaded[5]])
    assert {name: (str(each.dtype), tuple(each.shape)) for name, each in batch.items()} == dict.fromkeys(
        COLUMNS, ("torch.int64", (2, 8))
    )
    loaded.map(lambda row: {"n": len(row["input_ids"])}).save_to_disk(tmp_path / "again")
    assert np.array_equal(ArrowDataset([tmp_path / "again"], 8).samples(np.arange(6))["tokens"], tokens)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "large", "fixed", "narrow", "mixed"])
def test_we_read_theirs(tmp_path: Path, shards: int, kind: str) -> None:
    tokens = np.arange(77).reshape(11, 7)
    width = datasets.Value("uint16" if kind == "narrow" else "int64")
    kinds = {
        "plain": None,
        "large": datasets.LargeList(width),
        "fixed": datasets.List(width, length=7),
        "narrow": datasets.List(width),
        "mixed": datasets.List(width),
    }
    features = kinds[kind] and datasets.Features({"input_ids": kinds[kind], "text": datasets.Value("string")})
    save(tmp_path / "x", {"input_ids": tokens.tolist(), "text": ["x"] * 11}, features, num_shards=shards)
    source = ArrowDataset([tmp_path / "x"], 7)
    paths = [tmp_path / "x"]
    if kind == "mixed":  # two directories whose numbers have different sizes
        save(tmp_path / "y", {"input_ids": tokens.tolist()}, num_shards=shards)
        source, tokens = ArrowDataset([*paths, tmp_path / "y"], 7), np.concatenate((tokens, tokens))
    numbers = np.random.default_rng(0).permutation(len(source))
    found = source.samples(numbers)
    assert len(source) == len(tokens)
    assert found["tokens"].dtype == found["labels"].dtype == np.int32
    assert np.array_equal(found["tokens"], tokens[numbers])
    assert np.array_equal(found["labels"][:, :-1], tokens[numbers][:, 1:])
    assert (found["labels"][:, -1] == -100).all()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from([1, 1500, 1 << 20]), st.randoms())
@settings(max_examples=40, deadline=None)
def test_any_row_by_its_number(batches: list[int], shard: int, draw: object) -> None:
    with TemporaryDirectory() as directory:
        tokens = write(Path(directory) / "x", [*batches, 1], 5, shard)
        source = ArrowDataset([Path(directory) / "x"], 5)
        numbers = np.array([draw.randrange(len(tokens)) for _ in range(9)])
        assert len(source) == len(tokens)
        assert np.array_equal(source.samples(numbers)["tokens"], tokens[numbers])
        for wrong in (-1, len(tokens)):
            with pytest.raises(IndexError):
                source.samples(np.array([0, wrong]))


def test_labels_that_count_nowhere_stay_so(tmp_path: Path) -> None:
    ids = [[1, 2, 3, 4], [5, 6, 7, 0]]
    save(tmp_path / "own", {"input_ids": ids, "labels": [[-100, -100, 3, 4], [5, 6, 7, -100]]})
    assert ArrowDataset([tmp_path / "own"], 4).samples(np.arange(2))["labels"].tolist() == [
        [-100, 3, 4, -100],
        [6, 7, -100, -100],
    ]
    save(tmp_path / "attention_mask", {"input_ids": ids, "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 0]]})
    assert ArrowDataset([tmp_path / "attention_mask"], 4).samples(np.arange(2))["labels"].tolist() == [
        [2, 3, 4, -100],
        [6, 7, -100, -100],
    ]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_documents_are_kept_apart_as_other_sources_do(lengths: list[int], sequence: int) -> None:
    ends = np.cumsum(lengths)
    tokens = np.arange(ends[-1] + sequence + 1, dtype=np.int32)
    begins = np.append(ends - lengths, ends[-1])
    rows = TokenSamples(ContiguousTokens("x", tokens, begins), sequence, 1000, document_mask=True)
    whole = len(tokens) // sequence
    wanted = rows.samples(np.arange(whole - 1))
    if not len(wanted["tokens"]):
        return
    mask = np.ones(wanted["tokens"].shape, np.int8)
    columns = {"input_ids": wanted["tokens"], "labels": wanted["tokens"], "attention_mask": mask}
    with TemporaryDirectory() as directory:
        with ArrowDatasetWriter(Path(directory) / "x", COLUMNS) as writer:
            writer.add({**columns, "position_ids": wanted["position_ids"]})
        found = ArrowDataset([Path(directory) / "x"], sequence, True).samples(np.arange(whole - 1))
        assert found.keys() == wanted.keys()
        for name in ("tokens", "document_ids", "position_ids"):
            assert np.array_equal(found[name], wanted[name])
        assert np.array_equal(found["labels"][:, :-1], wanted["labels"][:, :-1])


def test_opening_and_reading_copy_no_more_than_what_is_asked_for(tmp_path: Path) -> None:
    with ArrowDatasetWriter(tmp_path / "x", COLUMNS) as writer:
        for _ in range(20):
            writer.add(rows_of(64, 2048))
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    source = ArrowDataset([tmp_path / "x"], 2048)
    source.samples(np.array([5, 700]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(source) * 2048 * 13 > 30 << 20
    assert peak < 1 << 20
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_nothing_is_left_of_a_directory_that_was_not_finished(tmp_path: Path) -> None:
    def fail(overwrite: bool) -> None:
        with ArrowDatasetWriter(tmp_path / "x", COLUMNS, overwrite) as writer:
            writer.add(rows_of(3, 8))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail(False)
    assert list(tmp_path.iterdir()) == []
    tokens = write(tmp_path / "x", [2])
    with pytest.raises(KeyboardInterrupt):
        fail(True)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert datasets.load_from_disk(tmp_path / "x")["input_ids"][:] == tokens.tolist()


def test_only_a_saved_data_set_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", [1])
    with pytest.raises(UserError, match="--overwrite replaces it"):
        ArrowDatasetWriter(tmp_path / "empty", COLUMNS)
    with ArrowDatasetWriter(tmp_path / "empty", COLUMNS, overwrite=True) as writer:
        writer.add(rows_of(4, 8))
    assert len(datasets.load_from_disk(tmp_path / "empty")) == 4
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("dear")
    for name in ("mine", "file"):
        with pytest.raises(UserError, match="choose another name"):
            ArrowDatasetWriter(tmp_path / name, COLUMNS, overwrite=True)
    with pytest.raises(UserError, match="no directory that can be written to"):
        ArrowDatasetWriter(tmp_path / "nowhere" / "x", COLUMNS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "mine"]


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    prints = []
    for name, batches in (("a", [2, 1]), ("b", [2, 1]), ("c", [1, 2])):
        write(tmp_path / name, batches)
        prints.append(json.loads((tmp_path / name / "state.json").read_text())["_fingerprint"])
    assert prints[0] == prints[1] != prints[2]


def refused(words: str, *paths: Path, sequence: int = 8, **options: object) -> None:
    with pytest.raises(UserError, match=words) as caught:
        ArrowDataset(paths, sequence, **options).samples(np.array([0]))
    assert "\n" not in str(caught.value)


def test_rows_of_another_length(tmp_path: Path) -> None:
    write(tmp_path / "x", [3])
    refused(r"rows of 8 tokens, but data\.seq_len=4096; nearest: 8", tmp_path / "x", sequence=4096)
    refused("nearest: 8", tmp_path / "x", sequence=4)
    save(tmp_path / "y", {"input_ids": [[1, 2], [3]]})
    refused("rows of 1 to 2 tokens; pack them", tmp_path / "y", sequence=2)
    save(tmp_path / "z", {"input_ids": [[1, 2]], "labels": [[1]]})
    refused("nearest: 1", tmp_path / "z", sequence=2)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    row = [list(range(8))]
    refused("no such directory", tmp_path / "nowhere")
    refused("has no state.json", tmp_path)
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"input_ids": row})}).save_to_disk(tmp_path / "dict")
    refused(r"has splits; name one of: .*/dict/train", tmp_path / "dict")
    assert len(ArrowDataset([tmp_path / "dict" / "train"], 8)) == 1
    for name, columns, words in (
        ("text", {"text": ["x"]}, "no column 'input_ids'; has: text"),
        ("word", {"input_ids": [3]}, "'input_ids' is int32; wanted: a list"),
        ("real", {"input_ids": [[0.5] * 8]}, "wanted: a list of whole numbers"),
        ("class", {"input_ids": row, "labels": [1]}, "column 'labels' is int64"),
        ("null", {"input_ids": [*row, None]}, "missing"),
        ("hole", {"input_ids": [[1, None] * 4]}, "missing"),
        ("negative", {"input_ids": [[-1] * 8]}, "token -1 in row 0"),
        ("label", {"input_ids": row, "labels": [[-1] * 8]}, "token -1 in row 0"),
    ):
        save(tmp_path / name, columns)
        refused(words, tmp_path / name)
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int64"))})
    save(tmp_path / "large", {"input_ids": [[2**31] * 8]}, features)
    refused("token 2147483648 in row 0", tmp_path / "large")
    save(tmp_path / "plain", {"input_ids": row})
    refused("token 7 in row 0, but tokens are 0 to 6", tmp_path / "plain", vocab=7)
    refused("no column 'position_ids'.*data.document_mask=false", tmp_path / "plain", separate=True)
    write(tmp_path / "ours", [1])
    refused("has input_ids, labels, but .* input_ids", tmp_path / "plain", tmp_path / "ours")
    save(tmp_path / "none", {"input_ids": []}, features)
    refused("has no rows", tmp_path / "none")


def test_files_that_are_not_whole(tmp_path: Path) -> None:
    write(tmp_path / "x", [3, 3], shard=1)
    second = tmp_path / "x" / "data-00001-of-00002.arrow"
    whole = second.read_bytes()
    for length in (0, 4, 100, len(whole) - 8, len(whole) - 1):
        second.write_bytes(whole[:length])
        refused("truncated", tmp_path / "x")
    second.write_bytes(whole + whole)
    refused("bytes too early", tmp_path / "x")
    second.unlink()
    refused("names 'data-00001-of-00002.arrow', which is not in", tmp_path / "x")
    for content in ("", "{", "[]", '{"_data_files": 3}', '{"_data_files": [{}]}', "[" * 100_000):
        (tmp_path / "x" / "state.json").write_text(content)
        refused("has no list of data files", tmp_path / "x")
    (tmp_path / "x" / "state.json").write_text('{"_data_files": [{"filename": "../secret"}]}')
    refused("names '../secret'", tmp_path / "x")


def test_a_compressed_stream_is_not_unpacked_into_memory(tmp_path: Path) -> None:
    save(tmp_path / "x", {"input_ids": [list(range(8))] * 100})
    path = tmp_path / "x" / FILE
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    packed = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(str(path), table.schema, options=packed) as stream:
        stream.write_table(table)
    refused("is compressed", tmp_path / "x")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Saved data sets of each kind, to be damaged."""
    here = tmp_path_factory.mktemp("bases")
    tokens = np.arange(40).reshape(5, 8).tolist()
    write(here / "ours", [3, 2])
    save(here / "theirs", {"input_ids": tokens, "labels": tokens, "text": ["a", "", "b", "c", "d"]})
    kinds = {"input_ids": datasets.List(datasets.Value("int32"), length=8)}
    kinds["labels"] = datasets.LargeList(datasets.Value("int64"))
    save(here / "fixed", {"input_ids": tokens, "labels": tokens}, datasets.Features(kinds))
    return [here / "ours", here / "theirs", here / "fixed"]


@given(
    st.integers(0, 2),
    st.sampled_from([FILE, FILE, FILE, "state.json", "dataset_info.json"]),
    st.one_of(EDITS, EDITS, EDITS, st.binary(max_size=300)),
)
@settings(max_examples=250, deadline=None)
def test_damaged_files_are_refused_or_read_as_arrow_reads_them(
    bases: list[Path], which: int, file: str, damage: object
) -> None:
    with TemporaryDirectory() as directory:
        place = Path(directory) / "x"
        shutil.copytree(bases[which], place)
        content = (place / file).read_bytes()
        (place / file).write_bytes(damage if isinstance(damage, bytes) else mutate(content, damage))
        try:
            source = ArrowDataset([place], 8)
            found = source.samples(np.arange(len(source)))
        except UserError as error:
            in_one_line(error)
            return
        table = pa.ipc.open_stream(pa.memory_map(str(place / FILE))).read_all()
        assert found["tokens"].tolist() == table.column("input_ids").to_pylist()
