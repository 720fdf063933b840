"""Inspection reports the content of files; with --check, an invalid value is a one-line error and exit code 2."""

import gzip
import io
import json
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import datasets
import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.file_damage import EDITS, assert_one_line, mutate
from tests.support.token_files import write_documents
from trainyard.cli import main
from trainyard.cli.commands.data.inspect import format_histogram, quote_for_terminal
from trainyard.core.errors import UserError
from trainyard.prepare import inspect as inspection
from trainyard.prepare.arrow_writer import ArrowDatasetWriter
from trainyard.prepare.inspect import InspectOptions, InspectReport, LengthStats, inspect_path

datasets.disable_progress_bars()

CHECK = InspectOptions(check=True)


def inspect(path: Path, options: InspectOptions = InspectOptions()) -> InspectReport:  # noqa: B008
    return inspect_path(path, options, lambda done, total: None)


def assert_refused(message: str, path: Path, options: InspectOptions = CHECK) -> None:
    with pytest.raises(UserError, match=message) as caught:
        inspect(path, options)
    assert "\n" not in str(caught.value)


def write_bert_file(path: Path, **changes: object) -> Path:
    columns: dict[str, object] = {
        "input_ids": np.arange(24, dtype="i4").reshape(3, 8),
        "input_mask": (np.arange(8) < np.array([[8], [5], [2]])).astype("i1"),
        "segment_ids": np.zeros((3, 8), "i1"),
        "masked_lm_positions": np.array([[1, 2], [3, 0], [1, 0]], "i4"),
        "masked_lm_ids": np.array([[5, 6], [7, 0], [8, 0]], "i4"),
        "next_sentence_labels": np.array([0, 1, 0], "i1"),
    }
    with h5py.File(path, "w") as file:
        for name, values in {**columns, **changes}.items():
            if values is not None:
                file.create_dataset(name, data=values)
    return path


@given(st.lists(st.lists(st.integers(0, 5000), max_size=20), max_size=5))
@examples(60)
def test_length_statistics_are_exact(groups: list[list[int]]) -> None:
    lengths, stats = [length for group in groups for length in group], LengthStats()
    for group in groups:
        stats.add(np.array(group, np.int64))
    summary = stats.summary()
    if not lengths:
        assert summary == {}
        return
    assert (summary["shortest"], summary["longest"]) == (min(lengths), max(lengths))
    assert summary["median"] == statistics.median(lengths)
    assert summary["mean"] == pytest.approx(statistics.mean(lengths))
    bins = summary["histogram"]
    for entry in bins:
        assert entry["count"] == sum(entry["from"] <= length <= entry["to"] for length in lengths)
    assert sum(entry["count"] for entry in bins) == len(lengths)
    assert all(first["to"] + 1 == second["from"] for first, second in pairwise(bins))
    assert bins[0]["count"] > 0 < bins[-1]["count"]


@given(st.lists(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=3), max_size=10), st.integers(1, 7))
@examples(60)
def test_token_files(documents: list[list[list[int]]], elements_per_read: int) -> None:
    tokens = [[token for sequence in document for token in sequence] for document in documents]
    with TemporaryDirectory() as directory, patch.object(inspection, "ELEMENTS_PER_READ", elements_per_read):
        write_documents(Path(directory) / "x", documents)
        report = inspect(Path(directory) / "x", InspectOptions(check=True, num_samples=3, vocab_size=10, end_token=4))
    assert report.facts["dtype"] == "uint16"
    assert report.facts["documents"] == len(documents)
    assert report.facts["sequences"] == sum(map(len, documents))
    assert report.facts["tokens"] == sum(map(len, tokens))
    assert report.facts["empty documents"] == sum(not document for document in tokens)
    assert report.facts["documents ending with it"] == sum(document[-1:] == [4] for document in tokens)
    assert report.lengths["tokens per document"].get("longest", 0) == max(map(len, tokens), default=0)
    count = len(documents)
    indices = [index * count // 3 for index in range(3)] if count > 3 else range(count)
    assert [sample for _, sample in report.samples] == [tokens[index] for index in indices]


def test_invalid_token_files(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "x", [[[1, 2, 3]], [[4, 50]]], "int32").prefix
    assert inspect(prefix, CHECK).facts["end token"] in (3, 50)
    assert_refused(r"x\.bin: token 50 at 4; expected 0 to 49", prefix, CHECK._replace(vocab_size=50))
    write_documents(tmp_path / "n", [[[1, -2]]], "int32")
    assert_refused("token -2 at 1", tmp_path / "n")
    index = (tmp_path / "x.idx").read_bytes()
    (tmp_path / "x.idx").write_bytes(index[:50] + np.array([4], "<i8").tobytes() + index[58:])
    assert_refused("sequence 1 starts at byte 4, the previous one ends at 12", prefix)
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes() + bytes(4))
    assert_refused("6 tokens, but by the index 5", prefix)
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes()[:-8])
    assert_refused("truncated", prefix, InspectOptions())


def test_arrow(tmp_path: Path) -> None:
    rows = {
        "input_ids": [[1, 2, 3], [4, 5], [], [6]],
        "labels": [[1, -100, 3], [4, 5], [], [6]],
        "position_ids": [[0, 1, 0], [1, 2], [], [0]],
    }
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "x", num_shards=2)
    report = inspect(tmp_path / "x", CHECK._replace(num_samples=5))
    facts = report.facts
    assert (facts["files"], facts["sequences"], facts["tokens"]) == (2, 4, 6)
    assert facts["bytes"] == sum(path.stat().st_size for path in (tmp_path / "x").iterdir())
    assert (facts["ignored labels"], facts["document spans"]) == (1, 4)
    assert [tokens for _, tokens in report.samples] == rows["input_ids"]
    assert_refused("token 4 at 3; expected 0 to 3", tmp_path / "x", CHECK._replace(vocab_size=4))
    for name, columns, message in (
        ("mask", {"attention_mask": [[2, 0, 0]]}, "attention_mask 2 at 0"),
        ("label", {"labels": [[1, -5, 3]]}, "label -5 at 1"),
        ("position", {"position_ids": [[-1, 0, 0]]}, "position -1 at 0"),
        ("short", {"labels": [[1, 2]]}, "'labels' has not the length of its input_ids"),
    ):
        datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]], **columns}).save_to_disk(tmp_path / name)
        assert inspect(tmp_path / name).facts["tokens"] == 3
        assert_refused(message, tmp_path / name)
    datasets.Dataset.from_dict({"text": ["abc", "d"]}).save_to_disk(tmp_path / "text")
    assert inspect(tmp_path / "text").facts["characters"] == 4
    datasets.DatasetDict({"a": datasets.Dataset.from_dict(rows)}).save_to_disk(tmp_path / "dict")
    assert_refused("use one of", tmp_path / "dict", InspectOptions())


def test_hdf5(tmp_path: Path) -> None:
    with patch.object(inspection, "ELEMENTS_PER_READ", 16):  # two rows at a time
        report = inspect(write_bert_file(tmp_path / "x.hdf5"), CHECK._replace(vocab_size=24, num_samples=1))
    assert (report.facts["sequences"], report.facts["tokens"]) == (3, 15)
    assert report.facts["columns"]["input_ids"] == "int32 [3, 8]"
    assert report.lengths["tokens per sequence"]["median"] == 5
    assert report.samples == [("row 0", [*range(8)])]
    assert_refused("input_ids 23 at 23", tmp_path / "x.hdf5", CHECK._replace(vocab_size=23))
    for changes, message in (
        ({"input_mask": np.full((3, 8), 2, "i1")}, "input_mask 2 at 0"),
        ({"masked_lm_positions": np.full((3, 2), 8, "i4")}, "masked_lm_positions 8 at 0"),
        ({"next_sentence_labels": np.array([0, 0, 2], "i1")}, "next_sentence_labels 2 at 2"),
        ({"next_sentence_labels": np.zeros(2, "i1")}, "does not have 3 rows"),
        ({"input_ids": np.zeros((3, 8))}, "of integers"),
        ({"input_ids": None}, "no dataset 'input_ids'"),
        ({"input_mask": np.zeros(3, "i1")}, r"'input_mask' is \[3\], but"),
    ):
        assert_refused(message, write_bert_file(tmp_path / "y.hdf5", **changes))
    with h5py.File(tmp_path / "huge.hdf5", "w") as file:
        file.create_dataset("input_ids", (1 << 40, 8), "i4", chunks=(1024, 8))
    assert_refused("more than the file can hold", tmp_path / "huge.hdf5", InspectOptions())
    content = (tmp_path / "x.hdf5").read_bytes()
    (tmp_path / "x.hdf5").write_bytes(content[: len(content) // 2])
    assert_refused("cannot be read as HDF5", tmp_path / "x.hdf5", InspectOptions())


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress], ids=["plain", "gz"])
def test_json_lines(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / ("x.jsonl" if pack(b"") == b"" else "x.jsonl.gz")
    path.write_bytes(pack('{"text": "naïve"}\n\n{"text": ""}\nnonsense\n{"text": "東京"}'.encode()))
    report = inspect(path, InspectOptions(num_samples=2))
    assert report.facts == {
        "documents": 3,
        "empty documents": 1,
        "malformed": 1,
        "characters": 7,
        "bytes": path.stat().st_size,
    }
    assert report.samples == [("document 0", "naïve"), ("document 1", "")]
    assert_refused("line 4: not JSON", path)
    assert_refused("line 1: no text under 'body'", path, CHECK._replace(text_key="body"))


def run(*arguments: object, encoding: str = "utf-8") -> tuple[int, str, str]:
    """Run the command in this process; returns exit code, output and errors."""
    out, errors = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    with (
        patch.object(sys, "argv", ["trainyard", "data", "inspect", *map(str, arguments)]),
        patch.object(sys, "stdout", out),
        patch.object(sys, "stderr", errors),
        pytest.raises(SystemExit) as ended,
    ):
        main.main()
    for stream in (out, errors):
        stream.seek(0)
    return int(ended.value.code or 0), out.read(), errors.read()


def test_command_prints_report_samples_and_errors(tmp_path: Path) -> None:
    text = [*"Grüße\x1b[2J".encode(), 256]
    prefix = write_documents(tmp_path / "x", [[text]] * 3 + [[[65]]]).prefix
    code, out, errors = run(prefix, "--check", "--samples", 2, "--tokenizer", "bytes")
    assert (code, errors) == (0, "")
    assert "documents ending with it    3" in out
    assert 'document 0: "Grüße\\x1b[2J"' in out
    assert "8 to 15             3 " + "█" * 40 in out
    code, out, _ = run(prefix, "--samples", 1, encoding="ascii")
    assert "8 to 15             3 " + "#" * 40 in out
    assert f"document 0: {' '.join(map(str, text))}" in out
    code, out, errors = run(prefix, tmp_path / "nowhere")
    assert (code, errors) == (2, f"trainyard: {tmp_path / 'nowhere'}: no such file\n")
    code, _, errors = run(prefix, "--check", "--vocab", 256)
    assert (code, errors.count("\n")) == (2, 1)
    assert "token 256 at 11" in errors


def test_json_output(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "x", [[[72, 105, 256]]]).prefix
    with ArrowDatasetWriter(tmp_path / "blocks", {"input_ids": "int32"}) as writer:
        writer.add({"input_ids": np.array([[72, 256]], np.int32)})
    (tmp_path / "x.jsonl").write_text('{"text": "\\ud83e\\udd16"}')
    paths = (prefix, tmp_path / "blocks", write_bert_file(tmp_path / "x.h5"), tmp_path / "x.jsonl")
    code, out, _ = run(*paths, "--json", "--check", "--samples", 1, "--tokenizer", "bytes")
    assert code == 0
    reports = json.loads(out)["files"]
    assert [report["path"] for report in reports] == [str(path) for path in paths]
    assert reports[0]["samples"] == [{"from": "document 0", "tokens": [72, 105, 256], "text": "Hi"}]
    assert reports[0]["lengths"]["tokens per document"]["longest"] == 3
    assert reports[1]["tokens"] == 2
    assert reports[3]["samples"] == [{"from": "document 0", "text": "🤖"}]


def test_histogram_bars_are_proportional() -> None:
    lines = format_histogram([{"from": 1, "to": 1, "count": 1000}, {"from": 2, "to": 3, "count": 500}])
    assert [line.count("█") + line.count("#") for line in lines] == [40, 20]
    small = format_histogram([{"from": 0, "to": 0, "count": 10**9}, {"from": 1, "to": 1, "count": 1}])[1]
    assert small.split()[-1] in ("▏", "#")  # a nonzero count is always visible


def test_control_characters_are_escaped() -> None:
    assert quote_for_terminal("\u202e") == '"\\u202e"'


LINES = b'{"text": "one"}\n{"text": "two", "more": [1, {"a": null}]}\n\n{"text": ""}\n'


@pytest.fixture(scope="module")
def saved_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("saved")
    rows = np.arange(12, dtype=np.int32).reshape(3, 4)
    with ArrowDatasetWriter(root / "x", {"input_ids": "int32", "labels": "int32"}) as writer:
        writer.add({"input_ids": rows, "labels": rows})
    return {path.name: path.read_bytes() for path in (root / "x").iterdir()}


@given(
    st.sampled_from(["lines", "data-00000-of-00001.arrow", "state.json", "dataset_info.json"]),
    st.one_of(EDITS, EDITS, st.binary(max_size=200)),
    st.booleans(),
)
@examples(200)
def test_damaged_files_are_refused_or_counted(
    saved_files: dict[str, bytes], file: str, damage: object, check: bool
) -> None:
    def damaged(data: bytes) -> bytes:
        return damage if isinstance(damage, bytes) else mutate(data, damage)

    with TemporaryDirectory() as directory:
        path = Path(directory) / "x.jsonl"
        if file == "lines":
            path.write_bytes(damaged(LINES))
        else:
            path = Path(directory)
            for name, content in saved_files.items():
                (path / name).write_bytes(damaged(content) if name == file else content)
        try:
            report = inspect(path, InspectOptions(check, num_samples=2))
        except UserError as error:
            assert_one_line(error)
            return
        json.dumps([report.facts, report.lengths, report.samples])
        if file == "lines":
            num_lines = sum(bool(line.strip()) for line in damaged(LINES).split(b"\n"))
            assert report.facts["documents"] + report.facts["malformed"] == num_lines
        elif file.endswith(".json"):
            assert report.facts["tokens"] == 12
