"""Packing: no token is lost or moved, for any lengths and workers; positions restart where documents begin."""

import gzip
import json
import os
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.file_damage import EDITS, assert_one_line, mutate
from tests.support.forkserver import ForkServer
from tests.support.token_files import write_documents
from trainyard.cli import main
from trainyard.core.errors import UserError
from trainyard.data.formats import documents
from trainyard.data.formats.arrow_dataset import ArrowDataset
from trainyard.data.formats.documents import UnreadableRecord
from trainyard.data.loading.demo_corpus import make_stories
from trainyard.data.text.tokenizer import TokenizerSpec
from trainyard.prepare import pack as packing
from trainyard.prepare.pack import PackCounts, PackOptions, chunks_from_text, chunks_from_tokens, write_blocks
from trainyard.prepare.tokenize import TokenizeOptions

datasets.disable_progress_bars()

END = 256
BYTES = TokenizerSpec("bytes")


def ignore(*_: object) -> None:
    return


def expected_stream(documents_: list[list[int]], end: int | None) -> tuple[list[int], list[int]]:
    """The tokens of all documents with end tokens, and the position of each token in its document."""
    tokens: list[int] = []
    positions: list[int] = []
    for document in documents_:
        if document and end is not None and document[-1] != end:
            document = [*document, end]
        tokens += document
        positions += range(len(document))
    return tokens, positions


def load_columns(directory: Path) -> dict[str, list[list[int]]]:
    loaded = datasets.load_from_disk(directory)
    return {name: loaded[name][:] for name in loaded.column_names}


def flatten(rows: list[list[int]]) -> list[int]:
    return [value for row in rows for value in row]


@given(
    st.lists(st.lists(st.lists(st.integers(0, 5), max_size=7), max_size=3), max_size=12),
    st.integers(1, 17),
    st.sampled_from([None, 3]),
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 3),
)
@examples(120)
def test_blocks_contain_the_stream_of_all_documents(
    documents_: list[list[list[int]]], seq_len: int, end: int | None, pad_last: bool, tokens_per_read: int, rows: int
) -> None:
    tokens, positions = expected_stream([flatten(document) for document in documents_], end)
    full, leftover = divmod(len(tokens), seq_len)
    with (
        TemporaryDirectory() as directory,
        patch.object(packing, "TOKENS_PER_READ", tokens_per_read),
        patch.object(packing, "MAX_BATCH_ROWS", rows),
    ):
        root = Path(directory)
        chunks = chunks_from_tokens(write_documents(root / "x", documents_), end)
        options = PackOptions(seq_len, pad_last, pad_token=9)
        if not full and not (leftover and pad_last):
            with pytest.raises(UserError, match="too few for a block"):
                write_blocks(chunks, root / "out", options, False, ignore, ignore)
            assert not (root / "out").exists()
            return
        counts = write_blocks(chunks, root / "out", options, False, ignore, ignore)
        columns = load_columns(root / "out")
    used = len(tokens) if pad_last else full * seq_len
    padding = -used % seq_len
    num_documents = sum(map(bool, map(flatten, documents_)))
    assert counts == PackCounts(num_documents, len(tokens), 0, (used + padding) // seq_len, leftover)
    assert flatten(columns["input_ids"]) == tokens[:used] + [9] * padding
    assert flatten(columns["labels"]) == tokens[:used] + [-100] * padding
    assert flatten(columns["attention_mask"]) == [1] * used + [0] * padding
    # Positions count from the start of the document or of the block, whichever is later; padding is a document.
    in_block = [position % seq_len for position in range(used)]
    expected = [min(pair) for pair in zip(positions, in_block, strict=False)] + list(range(padding))
    assert flatten(columns["position_ids"]) == expected
    assert {len(row) for row in columns["input_ids"]} == {seq_len}


@given(st.lists(st.text(max_size=30), max_size=12), st.integers(1, 40), st.sampled_from([2, 3]))
@examples(8)
def test_output_does_not_depend_on_workers(texts: list[str], seq_len: int, workers: int) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    tokens, _ = expected_stream([[*text.encode(), END] if text else [] for text in texts], END)
    with TemporaryDirectory() as directory, patch.object(documents, "SLICE_BYTES", 40):
        root = Path(directory)
        (root / "x.jsonl").write_text(lines)
        outputs = []
        for count in (1, workers):
            chunks = chunks_from_text([root / "x.jsonl"], TokenizeOptions(BYTES, ("text",), append_eod=True), count)
            options = PackOptions(seq_len, pad_last=True, pad_token=END)
            if not tokens:
                with pytest.raises(UserError, match="0 tokens"):
                    write_blocks(chunks, root / "out", options, True, ignore, ignore)
                return
            write_blocks(chunks, root / "out", options, True, ignore, ignore)
            outputs.append({path.name: path.read_bytes() for path in (root / "out").iterdir()})
        assert outputs[0] == outputs[1]
        assert flatten(load_columns(root / "out")["input_ids"])[: len(tokens)] == tokens


def test_packed_blocks_are_read_for_training(tmp_path: Path) -> None:
    documents_ = [[[5, 6, 7]], [[8]], [[9, 10, 11, 12, 13]], [[14, 15]]]
    data = write_documents(tmp_path / "x", documents_)
    write_blocks(chunks_from_tokens(data, 3), tmp_path / "out", PackOptions(4), False, ignore, ignore)
    sample = ArrowDataset([tmp_path / "out"], 4, document_mask=True).samples(np.arange(3))
    assert sample["tokens"].tolist() == [[5, 6, 7, 3], [8, 3, 9, 10], [11, 12, 13, 3]]
    assert sample["labels"].tolist() == [[6, 7, 3, -100], [3, 9, 10, -100], [12, 13, 3, -100]]
    assert sample["document_ids"].tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]
    assert sample["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize(("dtype", "token"), [("int32", -1), ("int64", 2**31), ("int64", -(2**40)), ("uint16", 300)])
def test_invalid_tokens_are_refused(tmp_path: Path, dtype: str, token: int) -> None:
    data = write_documents(tmp_path / "x", [[[1, 2, token]]], dtype)
    with pytest.raises(UserError, match=rf"x\.bin: token {token} at 2"):
        write_blocks(
            chunks_from_tokens(data, 3, vocab_size=300), tmp_path / "out", PackOptions(2), False, ignore, ignore
        )
    assert not (tmp_path / "out").exists()


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run the command in this process; returns exit code, output and errors."""
    with (
        patch.object(sys, "argv", ["trainyard", "data", "pack", *map(str, arguments)]),
        pytest.raises(SystemExit) as ended,
    ):
        main.main()
    out, errors = capsys.readouterr()
    return int(ended.value.code or 0), out, errors


@pytest.fixture
def json_lines(tmp_path: Path) -> Path:
    path = tmp_path / "x.jsonl"
    texts = [json.dumps({"text": text}) for text in make_stories(20)]
    path.write_text("\n".join([*texts[:3], "{broken", '{"title": "no text"}', '{"text": ""}', *texts[3:]]))
    return path


def test_malformed_lines_are_reported_and_counted(
    tmp_path: Path, json_lines: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = (json_lines, "--output", tmp_path / "out", "--seq-len", 64, "--tokenizer", "bytes", "--workers", 2)
    code, _, errors = run(capsys, *arguments, "--strict")
    assert (code, errors.count("\n")) == (2, 1)
    assert "x.jsonl: line 4: not JSON" in errors
    assert os.listdir(tmp_path) == ["x.jsonl"]
    code, out, errors = run(capsys, *arguments)
    assert code == 0
    assert "x.jsonl: line 4: not JSON" in errors
    assert "x.jsonl: line 5: no text under 'text'" in errors
    total = sum(len(text.encode()) + 1 for text in make_stories(20))
    assert f"20 documents, {total:,} tokens" in out
    assert "2 skipped" in out
    assert f"{total // 64} blocks of 64; the last {total % 64} tokens fill no block" in out
    code, _, errors = run(capsys, *arguments)
    assert (code, errors.count("\n")) == (2, 1)
    assert "--overwrite" in errors
    assert run(capsys, *arguments, "--overwrite", "--no-boundaries", "--keep-last")[0] == 0
    loaded = datasets.load_from_disk(tmp_path / "out")
    assert loaded.column_names == ["input_ids", "attention_mask", "labels"]
    assert len(loaded) == -(-total // 64)
    assert sorted(os.listdir(tmp_path)) == ["out", "x.jsonl"]


@pytest.mark.parametrize(
    ("documents_", "flags", "tokens"),
    [
        ([[1, 2, 0], [3, 0]], [], [1, 2, 0, 3, 0]),  # the end token is the last token of all documents
        ([[1, 2, 256], [3]], ["--tokenizer", "bytes"], [1, 2, 256, 3, 256]),  # appended where it is missing
        ([[1, 2], [3]], ["--no-append-eod"], [1, 2, 3]),
    ],
)
def test_end_token(
    tmp_path: Path, capsys: pytest.CaptureFixture, documents_: list[list[int]], flags: list[str], tokens: list[int]
) -> None:
    write_documents(tmp_path / "x", [[tokens] for tokens in documents_])
    code, _, errors = run(capsys, tmp_path / "x.bin", "--output", tmp_path / "out", "--seq-len", 1, *flags)
    assert code == 0, errors
    assert flatten(load_columns(tmp_path / "out")["input_ids"]) == tokens


@pytest.mark.parametrize("documents_", [[[1, 2], [3]], [[1, 0, 0], [2, 0]]])
def test_ambiguous_end_token_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture, documents_: list[list[int]]
) -> None:
    write_documents(tmp_path / "x", [[tokens] for tokens in documents_])
    code, _, errors = run(capsys, tmp_path / "x", "--output", tmp_path / "out", "--seq-len", 1)
    assert code == 2
    assert "--tokenizer" in errors
    assert not (tmp_path / "out").exists()


def test_several_inputs_form_one_stream(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name, first in (("a", 1), ("b", 10)):
        write_documents(tmp_path / name, [[[first, first + 1, 0]]])
    arguments = (tmp_path / "a", tmp_path / "b", "--output", tmp_path / "out", "--seq-len", 4)
    assert run(capsys, *arguments)[0] == 0
    assert load_columns(tmp_path / "out")["input_ids"] == [[1, 2, 0, 10]]


def test_user_mistakes_are_one_line_errors(tmp_path: Path, json_lines: Path, capsys: pytest.CaptureFixture) -> None:
    write_documents(tmp_path / "t", [[[1, 2]]])
    (tmp_path / "bad.bin").write_bytes(b"123")
    out = ("--output", tmp_path / "out")
    for arguments, message in (
        ((tmp_path / "nowhere", *out), "no such file"),
        ((tmp_path / "nowhere.bin", *out), "no such file"),
        ((tmp_path / "bad.bin", *out), "bad.idx: no such file"),
        ((json_lines, *out), "--tokenizer: missing"),
        ((json_lines, tmp_path / "t", *out), "both token files and text"),
        ((json_lines, *out, "--tokenizer", "bytes", "--json-key", "body"), "0 tokens, too few"),
        ((json_lines, *out, "--tokenizer", "bytes", "--seq-len", 1 << 20), "too few for a block of 1048576"),
        ((json_lines, "--output", json_lines, "--tokenizer", "bytes"), "choose another name"),
        ((json_lines, "--output", tmp_path, "--tokenizer", "bytes", "--overwrite"), "choose another name"),
    ):
        code, _, errors = run(capsys, *arguments)
        assert code == 2
        assert message in errors
        assert errors.splitlines()[-1].startswith("trainyard: ")
    assert sorted(os.listdir(tmp_path)) == ["bad.bin", "t.bin", "t.idx", "x.jsonl"]


def test_sigterm_leaves_nothing(cli: ForkServer, tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 10_000}) + "\n"
    (tmp_path / "x.jsonl").write_text(line * 10_000)
    arguments = ["x.jsonl", "--output", "out", "--tokenizer", "bytes", "--workers", "2"]
    process = cli.start(["data", "pack", *arguments], cwd=tmp_path)
    while not list(tmp_path.glob(".out.*.part/part-*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert os.listdir(tmp_path) == ["x.jsonl"]


LINES = "".join(json.dumps({"text": text, "n": [1.5, None]}) + "\n" for text in ("naïve", "", "a\nb", "東京")).encode()


@given(st.sampled_from(["x.jsonl", "x.jsonl.gz"]), st.one_of(EDITS, st.binary(max_size=120)), st.booleans())
@examples(100)
def test_damaged_lines_are_refused_or_skipped(name: str, damage: object, inside: bool) -> None:
    """The output has the texts that Python's json finds in the valid lines."""

    def valid_texts(data: bytes) -> list[str]:
        texts = []
        for line in data.split(b"\n"):
            try:
                document = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(document, dict) and isinstance(document.get("text"), str) and document["text"]:
                texts.append(document["text"])
        return texts

    def damaged(data: bytes) -> bytes:
        return damage if isinstance(damage, bytes) else mutate(data, damage)

    content = damaged(LINES) if inside or name == "x.jsonl" else LINES
    data = content
    if name.endswith(".gz"):
        data = gzip.compress(content) if inside else damaged(gzip.compress(content))
    unreadable: list[UnreadableRecord] = []
    with TemporaryDirectory() as directory:
        path = Path(directory) / name
        path.write_bytes(data)
        try:
            chunks = chunks_from_text([path], TokenizeOptions(BYTES, ("text",), append_eod=True), 1)
            write_blocks(
                chunks, Path(directory) / "out", PackOptions(3, pad_last=True), False, unreadable.append, ignore
            )
        except UserError as error:
            assert_one_line(error)
            return
        columns = load_columns(Path(directory) / "out")
    if name.endswith(".gz"):
        content = gzip.decompress(data)
    expected = [token for text in valid_texts(content) for token in (*text.encode(), END)]
    assert flatten(columns["input_ids"])[: len(expected)] == expected
    assert flatten(columns["attention_mask"]).count(1) == len(expected)
    assert all("\n" not in record.reason for record in unreadable)
