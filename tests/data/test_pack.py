"""Blocks: no token is lost or moved, whatever the lengths and workers; positions start again where documents begin."""

import gzip
import json
import os
import signal
import subprocess
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

from tests.data.file_damage import EDITS, assert_one_line, mutate
from tests.support.examples import examples
from trainyard.cli import main
from trainyard.core.errors import UserError
from trainyard.data.formats import documents
from trainyard.data.formats.arrow_dataset import ArrowDataset
from trainyard.data.formats.documents import UnreadableRecord
from trainyard.data.formats.megatron_bin import MegatronTokens, MegatronTokensWriter
from trainyard.data.loading.demo_corpus import make_stories
from trainyard.data.prepare import pack as packing
from trainyard.data.prepare.pack import PackCounts, PackOptions, chunks_from_text, chunks_from_tokens, write_blocks
from trainyard.data.prepare.tokenize import TokenizeOptions
from trainyard.data.text.tokenizer import TokenizerSpec

datasets.disable_progress_bars()

END = 256
BYTES = TokenizerSpec("bytes")


def token_files(prefix: Path, rows: list[list[list[int]]], dtype: str = "uint16") -> MegatronTokens:
    """Documents of sequences."""
    with MegatronTokensWriter(prefix, dtype) as writer:
        for document in rows:
            tokens = np.array([token for row in document for token in row], dtype)
            writer.add(tokens, np.array([len(row) for row in document], np.int32), np.array([len(document)]))
    return MegatronTokens(prefix)


def quiet(*_: object) -> None:
    return


def stream(rows: list[list[int]], end: int | None) -> tuple[list[int], list[int]]:
    """What the row of all documents has to be, and the position of each token in its document."""
    tokens: list[int] = []
    positions: list[int] = []
    for row in rows:
        whole = row if not row or end is None or row[-1] == end else [*row, end]
        tokens += whole
        positions += range(len(whole))
    return tokens, positions


def packed(directory: Path) -> dict[str, list[list[int]]]:
    loaded = datasets.load_from_disk(directory)
    return {name: loaded[name][:] for name in loaded.column_names}


def flat(rows: list[list[int]]) -> list[int]:
    return [number for row in rows for number in row]


@given(
    st.lists(st.lists(st.lists(st.integers(0, 5), max_size=7), max_size=3), max_size=12),
    st.integers(1, 17),
    st.sampled_from([None, 3]),
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 3),
)
@examples(120)
def test_all_blocks_together_are_the_row(
    rows: list[list[list[int]]], sequence: int, end: int | None, keep_last: bool, chunk: int, batch: int
) -> None:
    tokens, positions = stream([flat(document) for document in rows], end)
    whole, rest = divmod(len(tokens), sequence)
    with (
        TemporaryDirectory() as directory,
        patch.object(packing, "TOKENS_PER_READ", chunk),
        patch.object(packing, "MAX_BATCH_ROWS", batch),
    ):
        place = Path(directory)
        data = token_files(place / "x", rows)
        parts = chunks_from_tokens(data, end)
        shape = PackOptions(sequence, keep_last, pad_token=9)
        if not whole and not (rest and keep_last):
            with pytest.raises(UserError, match="too few for a block"):
                write_blocks(parts, place / "out", shape, False, quiet, quiet)
            assert not (place / "out").exists()
            return
        counts = write_blocks(parts, place / "out", shape, False, quiet, quiet)
        found = packed(place / "out")
    used = len(tokens) if keep_last else whole * sequence
    padding = -used % sequence
    assert counts == PackCounts(sum(map(bool, map(flat, rows))), len(tokens), 0, (used + padding) // sequence, rest)
    assert flat(found["input_ids"]) == tokens[:used] + [9] * padding
    assert flat(found["labels"]) == tokens[:used] + [-100] * padding
    assert flat(found["attention_mask"]) == [1] * used + [0] * padding
    # Positions are those in the document, counted from where the block begins if that is later; padding is a document.
    places = [place % sequence for place in range(used)]
    wanted = [min(pair) for pair in zip(positions, places, strict=False)] + list(range(padding))
    assert flat(found["position_ids"]) == wanted
    assert {len(row) for row in found["input_ids"]} == {sequence}


@given(st.lists(st.text(max_size=30), max_size=12), st.integers(1, 40), st.sampled_from([2, 3]))
@examples(8)
def test_text_by_any_number_of_workers(texts: list[str], sequence: int, workers: int) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    tokens, _ = stream([[*text.encode(), END] if text else [] for text in texts], END)
    with TemporaryDirectory() as directory, patch.object(documents, "SLICE_BYTES", 40):
        place = Path(directory)
        (place / "x.jsonl").write_text(lines)
        made = []
        for number in (1, workers):
            parts = chunks_from_text([place / "x.jsonl"], TokenizeOptions(BYTES, ("text",), append_eod=True), number)
            shape = PackOptions(sequence, pad_last=True, pad_token=END)
            if not tokens:
                with pytest.raises(UserError, match="0 tokens"):
                    write_blocks(parts, place / "out", shape, True, quiet, quiet)
                return
            write_blocks(parts, place / "out", shape, True, quiet, quiet)
            made.append({path.name: path.read_bytes() for path in (place / "out").iterdir()})
        assert made[0] == made[1]
        assert flat(packed(place / "out")["input_ids"])[: len(tokens)] == tokens


def test_what_is_packed_is_what_training_reads(tmp_path: Path) -> None:
    rows = [[[5, 6, 7]], [[8]], [[9, 10, 11, 12, 13]], [[14, 15]]]
    data = token_files(tmp_path / "x", rows)
    write_blocks(chunks_from_tokens(data, 3), tmp_path / "out", PackOptions(4), False, quiet, quiet)
    found = ArrowDataset([tmp_path / "out"], 4, document_mask=True).samples(np.arange(3))
    assert found["tokens"].tolist() == [[5, 6, 7, 3], [8, 3, 9, 10], [11, 12, 13, 3]]
    assert found["labels"].tolist() == [[6, 7, 3, -100], [3, 9, 10, -100], [12, 13, 3, -100]]
    assert found["document_ids"].tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]
    assert found["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]]


def test_sequences_that_do_not_lie_in_order_are_read_by_their_places(tmp_path: Path) -> None:
    token_files(tmp_path / "x", [[[1, 2]], [[4, 5]]])
    index = bytearray((tmp_path / "x.idx").read_bytes())
    index[42:58] = np.array([4, 0], "<i8").tobytes()  # byte offsets of the two, exchanged
    (tmp_path / "x.idx").write_bytes(index)
    write_blocks(
        chunks_from_tokens(MegatronTokens(tmp_path / "x"), 3), tmp_path / "out", PackOptions(3), False, quiet, quiet
    )
    assert packed(tmp_path / "out")["input_ids"] == [[4, 5, 3], [1, 2, 3]]


@pytest.mark.parametrize(("dtype", "token"), [("int32", -1), ("int64", 2**31), ("int64", -(2**40)), ("uint16", 300)])
def test_numbers_that_are_no_tokens_are_refused(tmp_path: Path, dtype: str, token: int) -> None:
    data = token_files(tmp_path / "x", [[[1, 2, token]]], dtype)
    with pytest.raises(UserError, match=rf"x\.bin: token {token} at 2"):
        write_blocks(chunks_from_tokens(data, 3, vocab_size=300), tmp_path / "out", PackOptions(2), False, quiet, quiet)
    assert not (tmp_path / "out").exists()


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """The command in this process: exit code, output, errors."""
    with patch.object(sys, "argv", ["trainyard", "data", "pack", *map(str, words)]), pytest.raises(SystemExit) as ended:
        main.main()
    out, errors = capsys.readouterr()
    return int(ended.value.code or 0), out, errors


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "x.jsonl"
    texts = [json.dumps({"text": text}) for text in make_stories(20)]
    path.write_text("\n".join([*texts[:3], "{broken", '{"title": "no text"}', '{"text": ""}', *texts[3:]]))
    return path


def test_malformed_lines_are_named_and_counted(tmp_path: Path, lines: Path, capsys: pytest.CaptureFixture) -> None:
    words = (lines, "--output", tmp_path / "out", "--seq-len", 64, "--tokenizer", "bytes", "--workers", 2)
    code, _, errors = run(capsys, *words, "--strict")
    assert (code, errors.count("\n")) == (2, 1)
    assert "x.jsonl: line 4: not JSON" in errors
    assert os.listdir(tmp_path) == ["x.jsonl"]
    code, out, errors = run(capsys, *words)
    assert code == 0
    assert "x.jsonl: line 4: not JSON" in errors
    assert "x.jsonl: line 5: no text under 'text'" in errors
    total = sum(len(text.encode()) + 1 for text in make_stories(20))
    assert f"20 documents, {total:,} tokens" in out
    assert "2 skipped" in out
    assert f"{total // 64} blocks of 64; the last {total % 64} tokens fill no block" in out
    code, _, errors = run(capsys, *words)
    assert (code, errors.count("\n")) == (2, 1)
    assert "--overwrite" in errors
    assert run(capsys, *words, "--overwrite", "--no-boundaries", "--keep-last")[0] == 0
    loaded = datasets.load_from_disk(tmp_path / "out")
    assert loaded.column_names == ["input_ids", "attention_mask", "labels"]
    assert len(loaded) == -(-total // 64)
    assert sorted(os.listdir(tmp_path)) == ["out", "x.jsonl"]


@pytest.mark.parametrize(
    ("rows", "words", "tokens"),
    [
        ([[1, 2, 0], [3, 0]], [], [1, 2, 0, 3, 0]),  # the end is what documents end with
        ([[1, 2, 256], [3]], ["--tokenizer", "bytes"], [1, 2, 256, 3, 256]),  # by document
        ([[1, 2], [3]], ["--no-append-eod"], [1, 2, 3]),
    ],
)
def test_the_end_of_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture, rows: list[list[int]], words: list[str], tokens: list[int]
) -> None:
    token_files(tmp_path / "x", [[row] for row in rows])
    code, _, errors = run(capsys, tmp_path / "x.bin", "--output", tmp_path / "out", "--seq-len", 1, *words)
    assert code == 0, errors
    assert flat(packed(tmp_path / "out")["input_ids"]) == tokens


@pytest.mark.parametrize("rows", [[[1, 2], [3]], [[1, 0, 0], [2, 0]]])
def test_an_end_that_cannot_be_guessed_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture, rows: list[list[int]]
) -> None:
    token_files(tmp_path / "x", [[row] for row in rows])
    code, _, errors = run(capsys, tmp_path / "x", "--output", tmp_path / "out", "--seq-len", 1)
    assert code == 2
    assert "--tokenizer" in errors
    assert not (tmp_path / "out").exists()


def test_several_sets_are_one_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name, first in (("a", 1), ("b", 10)):
        token_files(tmp_path / name, [[[first, first + 1, 0]]])
    words = (tmp_path / "a", tmp_path / "b", "--output", tmp_path / "out", "--seq-len", 4)
    assert run(capsys, *words)[0] == 0
    assert packed(tmp_path / "out")["input_ids"] == [[1, 2, 0, 10]]


def test_mistakes_are_one_line(tmp_path: Path, lines: Path, capsys: pytest.CaptureFixture) -> None:
    token_files(tmp_path / "t", [[[1, 2]]])
    (tmp_path / "bad.bin").write_bytes(b"123")
    out = ("--output", tmp_path / "out")
    for words, line in (
        ((tmp_path / "nowhere", *out), "no such file"),
        ((tmp_path / "nowhere.bin", *out), "no such file"),
        ((tmp_path / "bad.bin", *out), "bad.idx: no such file"),
        ((lines, *out), "--tokenizer: missing"),
        ((lines, tmp_path / "t", *out), "both token files and text"),
        ((lines, *out, "--tokenizer", "bytes", "--json-key", "body"), "0 tokens, too few"),
        ((lines, *out, "--tokenizer", "bytes", "--seq-len", 1 << 20), "too few for a block of 1048576"),
        ((lines, "--output", lines, "--tokenizer", "bytes"), "choose another name"),
        ((lines, "--output", tmp_path, "--tokenizer", "bytes", "--overwrite"), "choose another name"),
    ):
        code, _, errors = run(capsys, *words)
        assert code == 2
        assert line in errors
        assert errors.splitlines()[-1].startswith("trainyard: ")
    assert sorted(os.listdir(tmp_path)) == ["bad.bin", "t.bin", "t.idx", "x.jsonl"]


def test_nothing_is_left_when_it_is_told_to_end(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 10_000}) + "\n"
    (tmp_path / "x.jsonl").write_text(line * 20_000)
    words = ["x.jsonl", "--output", "out", "--tokenizer", "bytes", "--workers", "2"]
    job = subprocess.Popen(
        [sys.executable, "-m", "trainyard", "data", "pack", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    while not list(tmp_path.glob(".out.*.part/part-*")):
        assert job.poll() is None
        time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    errors = job.communicate(timeout=30)[1]
    assert job.returncode == 130, errors
    assert "Traceback" not in errors
    assert os.listdir(tmp_path) == ["x.jsonl"]


LINES = "".join(json.dumps({"text": text, "n": [1.5, None]}) + "\n" for text in ("naïve", "", "a\nb", "東京")).encode()


@given(st.sampled_from(["x.jsonl", "x.jsonl.gz"]), st.one_of(EDITS, st.binary(max_size=120)), st.booleans())
@examples(100)
def test_damaged_lines_are_refused_or_skipped(name: str, damage: object, inside: bool) -> None:
    """What is packed is what Python's own json finds in the lines that are whole."""

    def texts(data: bytes) -> list[str]:
        found = []
        for line in data.split(b"\n"):
            try:
                document = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(document, dict) and isinstance(document.get("text"), str) and document["text"]:
                found.append(document["text"])
        return found

    def damaged(data: bytes) -> bytes:
        return damage if isinstance(damage, bytes) else mutate(data, damage)

    content = damaged(LINES) if inside or name == "x.jsonl" else LINES
    data = content
    if name.endswith(".gz"):
        data = gzip.compress(content) if inside else damaged(gzip.compress(content))
    bad: list[UnreadableRecord] = []
    with TemporaryDirectory() as directory:
        path = Path(directory) / name
        path.write_bytes(data)
        try:
            parts = chunks_from_text([path], TokenizeOptions(BYTES, ("text",), append_eod=True), 1)
            write_blocks(parts, Path(directory) / "out", PackOptions(3, pad_last=True), False, bad.append, quiet)
        except UserError as error:
            assert_one_line(error)
            return
        found = packed(Path(directory) / "out")
    if name.endswith(".gz"):
        content = gzip.decompress(data)
    wanted = [token for text in texts(content) for token in (*text.encode(), END)]
    assert flat(found["input_ids"])[: len(wanted)] == wanted
    assert flat(found["attention_mask"]).count(1) == len(wanted)
    assert all("\n" not in each.reason for each in bad)
