"""What is said about a file is what is in it; with --check, what cannot be right is one line and exit code 2."""

import gzip
import io
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import datasets
import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.file_damage import EDITS, assert_one_line, mutate
from tests.support.examples import examples
from trainyard.cli import main
from trainyard.cli.data.inspect import format_histogram, quote_for_terminal
from trainyard.core.errors import UserError
from trainyard.data.formats.arrow_writer import ArrowDatasetWriter as ArrowWriter
from trainyard.data.formats.megatron_bin import MegatronTokensWriter
from trainyard.data.prepare import inspect as inspection
from trainyard.data.prepare.inspect import inspect_path
from trainyard.data.prepare.length_stats import InspectOptions, InspectReport, LengthStats

datasets.disable_progress_bars()

CHECK = InspectOptions(check=True)


def look(path: Path, wanted: InspectOptions = InspectOptions()) -> InspectReport:  # noqa: B008
    return inspect_path(path, wanted, lambda done, total: None)


def refused(words: str, path: Path, wanted: InspectOptions = CHECK) -> None:
    with pytest.raises(UserError, match=words) as caught:
        look(path, wanted)
    assert "\n" not in str(caught.value)


def token_files(prefix: Path, rows: list[list[list[int]]], dtype: str = "int32") -> Path:
    with MegatronTokensWriter(prefix, dtype) as writer:
        for document in rows:
            tokens = np.array([token for row in document for token in row], dtype)
            writer.add(tokens, np.array([len(row) for row in document], np.int32), np.array([len(document)]))
    return prefix


def bert(path: Path, **changes: object) -> Path:
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
def test_figures_are_exact(parts: list[list[int]]) -> None:
    lengths, kept = [length for part in parts for length in part], LengthStats()
    for part in parts:
        kept.add(np.array(part, np.int64))
    figures = kept.summary()
    if not lengths:
        assert figures == {}
        return
    assert (figures["shortest"], figures["longest"]) == (min(lengths), max(lengths))
    assert figures["median"] == statistics.median(lengths)
    assert figures["mean"] == pytest.approx(statistics.mean(lengths))
    bins = figures["histogram"]
    for each in bins:
        assert each["count"] == sum(each["from"] <= length <= each["to"] for length in lengths)
    assert sum(each["count"] for each in bins) == len(lengths)
    assert all(bins[place]["to"] + 1 == bins[place + 1]["from"] for place in range(len(bins) - 1))
    assert bins[0]["count"] > 0 < bins[-1]["count"]


@given(st.lists(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=3), max_size=10), st.integers(1, 7))
@examples(60)
def test_token_files(rows: list[list[list[int]]], stretch: int) -> None:
    whole = [[token for row in document for token in row] for document in rows]
    with TemporaryDirectory() as directory, patch.object(inspection, "ELEMENTS_PER_READ", stretch):
        prefix = token_files(Path(directory) / "x", rows, "uint16")
        report = look(prefix, InspectOptions(check=True, num_samples=3, vocab_size=10, end_token=4))
    assert report.facts["dtype"] == "uint16"
    assert report.facts["documents"] == len(rows)
    assert report.facts["sequences"] == sum(map(len, rows))
    assert report.facts["tokens"] == sum(map(len, whole))
    assert report.facts["empty documents"] == sum(not document for document in whole)
    assert report.facts["documents that end with it"] == sum(document[-1:] == [4] for document in whole)
    figures = report.lengths["tokens of a document"]
    assert figures.get("longest", 0) == max(map(len, whole), default=0)
    assert [tokens for _, tokens in report.samples] == [
        whole[number * len(rows) // 3 if len(rows) > 3 else number] for number in range(min(3, len(rows)))
    ]


def test_token_files_that_are_wrong(tmp_path: Path) -> None:
    prefix = token_files(tmp_path / "x", [[[1, 2, 3]], [[4, 50]]])
    assert look(prefix, CHECK).facts["end token"] in (3, 50)
    refused(r"x\.bin: token 50 at 4; wanted: 0 to 49", prefix, CHECK._replace(vocab=50))
    negative = token_files(tmp_path / "n", [[[1, -2]]])
    refused("token -2 at 1", negative)
    index = (tmp_path / "x.idx").read_bytes()
    (tmp_path / "x.idx").write_bytes(index[:50] + np.array([4], "<i8").tobytes() + index[58:])
    assert look(prefix).facts["contiguous"] is False
    refused("sequence 1 does not begin where the one before ends", prefix)
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes() + bytes(4))
    refused("tokens after the last", prefix)
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes()[:-8])
    refused("truncated", prefix, InspectOptions())


def test_arrow(tmp_path: Path) -> None:
    rows = {
        "input_ids": [[1, 2, 3], [4, 5], [], [6]],
        "labels": [[1, -100, 3], [4, 5], [], [6]],
        "position_ids": [[0, 1, 0], [1, 2], [], [0]],
    }
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "x", num_shards=2)
    report = look(tmp_path / "x", CHECK._replace(samples=5))
    facts = report.facts
    assert (facts["files"], facts["sequences"], facts["tokens"]) == (2, 4, 6)
    assert facts["bytes"] == sum(path.stat().st_size for path in (tmp_path / "x").iterdir())
    assert (facts["labels that count nowhere"], facts["pieces of documents"]) == (1, 4)
    assert [tokens for _, tokens in report.samples] == rows["input_ids"]
    refused("token 4 at 3; wanted: 0 to 3", tmp_path / "x", CHECK._replace(vocab=4))
    for name, columns, words in (
        ("mask", {"attention_mask": [[2, 0, 0]]}, "attention_mask 2 at 0"),
        ("label", {"labels": [[1, -5, 3]]}, "label -5 at 1"),
        ("place", {"position_ids": [[-1, 0, 0]]}, "position -1 at 0"),
        ("short", {"labels": [[1, 2]]}, "'labels' is not as long as its input_ids"),
    ):
        datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]], **columns}).save_to_disk(tmp_path / name)
        assert look(tmp_path / name).facts["tokens"] == 3
        refused(words, tmp_path / name)
    datasets.Dataset.from_dict({"text": ["abc", "d"]}).save_to_disk(tmp_path / "text")
    assert look(tmp_path / "text").facts["characters"] == 4
    datasets.DatasetDict({"a": datasets.Dataset.from_dict(rows)}).save_to_disk(tmp_path / "dict")
    refused("name one of", tmp_path / "dict", InspectOptions())


def test_hdf5(tmp_path: Path) -> None:
    with patch.object(inspection, "ELEMENTS_PER_READ", 16):  # two rows at a time
        report = look(bert(tmp_path / "x.hdf5"), CHECK._replace(vocab=24, samples=1))
    assert (report.facts["sequences"], report.facts["tokens"]) == (3, 15)
    assert report.facts["columns"]["input_ids"] == "int32 [3, 8]"
    assert report.lengths["tokens of a sequence"]["median"] == 5
    assert report.samples == [("row 0", [*range(8)])]
    refused("input_ids 23 at 23", tmp_path / "x.hdf5", CHECK._replace(vocab=23))
    for changes, words in (
        ({"input_mask": np.full((3, 8), 2, "i1")}, "input_mask 2 at 0"),
        ({"masked_lm_positions": np.full((3, 2), 8, "i4")}, "masked_lm_positions 8 at 0"),
        ({"next_sentence_labels": np.array([0, 0, 2], "i1")}, "next_sentence_labels 2 at 2"),
        ({"next_sentence_labels": np.zeros(2, "i1")}, "is not 3 rows"),
        ({"input_ids": np.zeros((3, 8))}, "whole numbers"),
        ({"input_ids": None}, "no rows of 'input_ids'"),
        ({"input_mask": np.zeros(3, "i1")}, r"'input_mask' is \[3\], but"),
    ):
        refused(words, bert(tmp_path / "y.hdf5", **changes))
    with h5py.File(tmp_path / "huge.hdf5", "w") as file:
        file.create_dataset("input_ids", (1 << 40, 8), "i4", chunks=(1024, 8))
    refused("more than the file can hold", tmp_path / "huge.hdf5", InspectOptions())
    whole = (tmp_path / "x.hdf5").read_bytes()
    (tmp_path / "x.hdf5").write_bytes(whole[: len(whole) // 2])
    refused("not an HDF5 file that can be read", tmp_path / "x.hdf5", InspectOptions())


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress], ids=["plain", "gz"])
def test_json_lines(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / ("x.jsonl" if pack(b"") == b"" else "x.jsonl.gz")
    path.write_bytes(pack('{"text": "naïve"}\n\n{"text": ""}\nnonsense\n{"text": "東京"}'.encode()))
    report = look(path, InspectOptions(num_samples=2))
    assert report.facts == {
        "documents": 3,
        "empty documents": 1,
        "malformed": 1,
        "characters": 7,
        "bytes": path.stat().st_size,
    }
    assert report.samples == [("document 0", "naïve"), ("document 1", "")]
    refused("line 4: not JSON", path)
    refused("line 1: no text under 'body'", path, CHECK._replace(key="body"))


def run(*words: object, encoding: str = "utf-8") -> tuple[int, str, str]:
    """The command in this process: exit code, output, errors."""
    out, errors = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    with (
        patch.object(sys, "argv", ["trainyard", "data", "inspect", *map(str, words)]),
        patch.object(sys, "stdout", out),
        patch.object(sys, "stderr", errors),
        pytest.raises(SystemExit) as ended,
    ):
        main.main()
    for each in (out, errors):
        each.seek(0)
    return int(ended.value.code or 0), out.read(), errors.read()


def test_the_command(tmp_path: Path) -> None:
    text = [*"Grüße\x1b[2J".encode(), 256]
    prefix = token_files(tmp_path / "x", [[text]] * 3 + [[[65]]])
    code, out, errors = run(prefix, "--check", "--samples", 2, "--tokenizer", "bytes")
    assert (code, errors) == (0, "")
    assert "documents that end with it  3" in out
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


def test_one_json_object(tmp_path: Path) -> None:
    prefix = token_files(tmp_path / "x", [[[72, 105, 256]]])
    with ArrowWriter(tmp_path / "blocks", {"input_ids": "int32"}) as writer:
        writer.add({"input_ids": np.array([[72, 256]], np.int32)})
    (tmp_path / "x.jsonl").write_text('{"text": "\\ud83e\\udd16"}')
    words = (prefix, tmp_path / "blocks", bert(tmp_path / "x.h5"), tmp_path / "x.jsonl")
    code, out, _ = run(*words, "--json", "--check", "--samples", 1, "--tokenizer", "bytes")
    assert code == 0
    found = json.loads(out)["files"]
    assert [each["path"] for each in found] == [str(path) for path in words]
    assert found[0]["samples"] == [{"from": "document 0", "tokens": [72, 105, 256], "text": "Hi"}]
    assert found[0]["contiguous"] is True
    assert found[0]["lengths"]["tokens of a document"]["longest"] == 3
    assert found[1]["tokens"] == 2
    assert found[3]["samples"] == [{"from": "document 0", "text": "🤖"}]


def test_bars_are_in_proportion() -> None:
    lines = format_histogram([{"from": 1, "to": 1, "count": 1000}, {"from": 2, "to": 3, "count": 500}])
    assert [line.count("█") + line.count("#") for line in lines] == [40, 20]
    one, none = (
        format_histogram([{"from": 0, "to": 0, "count": 10**9}, {"from": 1, "to": 1, "count": 1}])[1],
        quote_for_terminal("\u202e"),
    )
    assert one.split()[-1] in ("▏", "#")  # what is there can be seen
    assert none == '"\\u202e"'


LINES = b'{"text": "one"}\n{"text": "two", "more": [1, {"a": null}]}\n\n{"text": ""}\n'


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    here = tmp_path_factory.mktemp("base")
    rows = np.arange(12, dtype=np.int32).reshape(3, 4)
    with ArrowWriter(here / "x", {"input_ids": "int32", "labels": "int32"}) as writer:
        writer.add({"input_ids": rows, "labels": rows})
    return {path.name: path.read_bytes() for path in (here / "x").iterdir()}


@given(
    st.sampled_from(["lines", "data-00000-of-00001.arrow", "state.json", "dataset_info.json"]),
    st.one_of(EDITS, EDITS, st.binary(max_size=200)),
    st.booleans(),
)
@examples(200)
def test_damaged_files_are_refused_or_counted(base: dict[str, bytes], file: str, damage: object, check: bool) -> None:
    def damaged(data: bytes) -> bytes:
        return damage if isinstance(damage, bytes) else mutate(data, damage)

    with TemporaryDirectory() as directory:
        path = Path(directory) / "x.jsonl"
        if file == "lines":
            path.write_bytes(damaged(LINES))
        else:
            path = Path(directory)
            for name, content in base.items():
                (path / name).write_bytes(damaged(content) if name == file else content)
        try:
            report = look(path, InspectOptions(check, num_samples=2))
        except UserError as error:
            assert_one_line(error)
            return
        json.dumps([report.facts, report.lengths, report.samples])
        if file == "lines":
            filled = sum(bool(line.strip()) for line in damaged(LINES).split(b"\n"))
            assert report.facts["documents"] + report.facts["malformed"] == filled
        elif file.endswith(".json"):
            assert report.facts["tokens"] == 12
