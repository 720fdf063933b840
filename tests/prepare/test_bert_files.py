"""BERT samples: pairs, masks, the same bytes for any number of workers, and complete files after a kill."""

import gzip
import json
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.kill_points import killed_before_change
from trainyard.cli.commands.data import app
from trainyard.cli.console import ProgressDisplay
from trainyard.core.errors import UserError
from trainyard.data.formats import bert_hdf5, documents
from trainyard.data.formats.bert_hdf5_cache import BertHdf5Dataset
from trainyard.data.formats.documents import UnreadableRecord
from trainyard.data.text.tokenizer import TokenizerSpec
from trainyard.prepare.bert_files import BertCounts, BertFileSet, build_bert_files, document_chunks
from trainyard.prepare.bert_samples import (
    BertOptions,
    TokenizedText,
    load_bert_tokenizer,
    make_pairs,
    make_samples,
    tokenize_documents,
)

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
DOCUMENTS, WORDS = 40, 300
"""Every word of every document is a distinct token, so that a token tells where it comes from."""
DATASETS = {
    "input_ids": ("i4", 2),
    "input_mask": ("i1", 2),
    "segment_ids": ("i1", 2),
    "masked_lm_positions": ("i4", 2),
    "masked_lm_ids": ("i4", 2),
    "next_sentence_labels": ("i1", 1),
}
Samples = dict[str, NDArray[np.int32]]


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> TokenizerSpec:
    """Word n of document m is the token 5 + m * WORDS + n; every third one continues a word."""
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    words = [f"{'##' if n % 3 == 2 else ''}{spell(m * WORDS + n)}" for m in range(DOCUMENTS) for n in range(WORDS)]
    path.write_text("\n".join([*SPECIAL_TOKENS, *words]) + "\n")
    return TokenizerSpec("wordpiece", str(path))


def spell(number: int) -> str:
    """A distinct word of five letters; words of one length are not prefixes of each other."""
    return "".join(chr(ord("a") + number // 26**digit % 26) for digit in range(4)) + "z"


def make_text() -> TokenizedText:
    """Documents of sentences of 3 to 30 words; the last sentence of a document may be shorter."""
    rng = np.random.default_rng(0)
    sentence_bounds, document_bounds = [0], [0]
    for document in range(DOCUMENTS):
        end = (document + 1) * WORDS
        while sentence_bounds[-1] < end:
            sentence_bounds.append(min(sentence_bounds[-1] + int(rng.integers(3, 31)), end))
        document_bounds.append(len(sentence_bounds) - 1)
    return TokenizedText(np.arange(5, 5 + DOCUMENTS * WORDS, dtype=np.int32), sentence_bounds, document_bounds)


def write_json_lines(path: Path, count: int = DOCUMENTS) -> Path:
    """The same words as documents of two lines, in sentences of twelve words."""
    lines = []
    for number in range(count):
        words = [spell(number % DOCUMENTS * WORDS + n) for n in range(WORDS)]
        joined = [f"{words[n]} {words[n + 1]}{words[n + 2]}" for n in range(0, WORDS, 3)]
        sentences = [" ".join(joined[n : n + 4]).capitalize() + "." for n in range(0, len(joined), 4)]
        lines.append(json.dumps({"text": " ".join(sentences[:10]) + "\n" + " ".join(sentences[10:])}))
    path.write_text("\n".join(lines) + "\n")
    return path


def make_batch(options: BertOptions, text: TokenizedText, chunk_id: int = 0) -> Samples:
    """The samples of a text by field, with unpacked masks."""
    records = make_samples(text, options, load_bert_tokenizer(options.tokenizer)[1], chunk_id)
    bits = {
        name: np.unpackbits(records[name], axis=1, count=options.seq_len).astype(np.int32)
        for name in ("attention_mask", "segment_ids")
    }
    return {**{name: records[name].astype(np.int32) for name in records.dtype.names if name not in bits}, **bits}


def original_tokens(samples: Samples) -> NDArray[np.int32]:
    """The tokens before masking."""
    tokens, positions = samples["tokens"].copy(), samples["masked_positions"]
    rows, columns = np.nonzero(positions)
    tokens[rows, positions[rows, columns]] = samples["labels"][rows, columns]
    return tokens


def build(
    inputs: list[Path], options: BertOptions, directory: Path, workers: int = 1, files: int | None = None
) -> tuple[BertCounts, list[UnreadableRecord]]:
    directory.mkdir(exist_ok=True)
    unreadable: list[UnreadableRecord] = []
    counts = build_bert_files(
        inputs, ["text"], options, BertFileSet(directory, "x", files), workers, unreadable.append, ProgressDisplay
    )
    assert [path for path in directory.iterdir() if not path.name.endswith(".hdf5")] == []
    return counts, unreadable


def test_samples_are_two_segments_between_special_tokens(vocab: TokenizerSpec) -> None:
    samples = make_batch(BertOptions(vocab, 64, 10, dupe_factor=3), make_text())
    tokens, mask, segments = original_tokens(samples), samples["attention_mask"], samples["segment_ids"]
    lengths = mask.sum(1)
    assert (np.diff(mask, axis=1) <= 0).all()
    assert (tokens[:, 0] == 2).all()
    assert (tokens[mask == 0] == 0).all()
    assert (segments[mask == 0] == 0).all()
    assert lengths.max() == 64
    assert ((tokens == 3).sum(1) == 2).all()
    assert ((tokens >= 5).sum(1) == lengths - 3).all()
    for row, length, segment in zip(tokens, lengths, segments, strict=True):
        first, second = np.flatnonzero(row == 3)
        assert second == length - 1
        assert first >= 2
        assert second >= first + 2
        assert segment.tolist() == [0] * (first + 1) + [1] * (second - first) + [0] * (64 - length)


def test_true_pairs_are_consecutive_and_random_pairs_come_from_two_documents(vocab: TokenizerSpec) -> None:
    samples = make_batch(BertOptions(vocab, 64, 10, dupe_factor=4), make_text())
    checked = 0
    for row, length, unrelated in zip(
        original_tokens(samples), samples["attention_mask"].sum(1), samples["next_sentence_labels"], strict=True
    ):
        first, second = np.flatnonzero(row == 3)
        a, b = row[1:first] - 5, row[first + 1 : second] - 5
        assert (np.diff(a) == 1).all()
        assert (np.diff(b) == 1).all()
        assert (a[0] // WORDS != b[0] // WORDS) == unrelated
        if not unrelated:
            assert b[0] > a[-1]
            if length < 64:  # nothing was truncated between them
                assert b[0] == a[-1] + 1
                checked += 1
    assert checked > 30


def test_segments_consist_of_whole_sentences(vocab: TokenizerSpec) -> None:
    text = make_text()
    bounds = set(text.sentence_bounds)
    options = BertOptions(vocab, 64, 10, short_seq_prob=0)
    pairs = list(make_pairs(text, options, np.random.default_rng(0)))
    for a, a_end, b, b_end, unrelated in pairs:
        assert {a, a_end, b, b_end} <= bounds
        assert a < a_end
        assert b < b_end
        assert unrelated or b == a_end
    # Every sentence is used: those that a random pair leaves out begin the next pair.
    covered = sorted(
        {(a, a_end) for a, a_end, *_ in pairs} | {(b, b_end) for _, _, b, b_end, unrelated in pairs if not unrelated}
    )
    assert covered[0][0] == 0
    assert covered[-1][1] == text.sentence_bounds[-1]
    assert all(end == start for (_, end), (start, _) in pairwise(covered))


def test_half_of_the_pairs_are_random(vocab: TokenizerSpec) -> None:
    text = make_text()
    pairs = [
        pair
        for seed in range(10)
        for pair in make_pairs(text, BertOptions(vocab, 128, 20), np.random.default_rng(seed))
    ]
    fraction = np.mean([unrelated for *_, unrelated in pairs])
    assert 0.5 < fraction < 0.65  # more than half, since a single remaining sentence needs a random partner
    other_documents = {b // WORDS for _, _, b, _, unrelated in pairs if unrelated}
    assert other_documents == set(range(DOCUMENTS))


def test_short_seq_prob_controls_the_fraction_of_short_samples(vocab: TokenizerSpec) -> None:
    lengths = [
        make_batch(BertOptions(vocab, 128, 20, short_seq_prob=short), make_text(), 1)["attention_mask"].sum(1)
        for short in (0.0, 0.1, 1.0)
    ]
    short_fractions = [(array < 90).mean() for array in lengths]
    assert short_fractions[0] < 0.2 < short_fractions[1] < 0.5 < short_fractions[2]


def test_single_document_has_only_true_pairs(vocab: TokenizerSpec) -> None:
    text = make_text()
    single = TokenizedText(text.tokens, text.sentence_bounds[: text.document_bounds[1] + 1], text.document_bounds[:2])
    samples = make_batch(BertOptions(vocab, 64, 10), single)
    assert len(samples["tokens"]) > 2
    assert not samples["next_sentence_labels"].any()


@pytest.mark.parametrize("whole_word", [False, True])
def test_fifteen_percent_are_masked_random_or_kept(vocab: TokenizerSpec, whole_word: bool) -> None:
    samples = make_batch(
        BertOptions(vocab, 128, 20, short_seq_prob=0.2, dupe_factor=20, whole_word_mask=whole_word), make_text()
    )
    positions, labels, lengths = samples["masked_positions"], samples["labels"], samples["attention_mask"].sum(1)
    counts = (positions > 0).sum(1)
    expected = np.clip(np.rint(0.15 * lengths), 1, 20)
    assert (counts <= expected).all()
    if not whole_word:
        assert (counts == expected).all()
    assert 0.14 < counts.sum() / lengths.sum() < 0.155
    used = positions > 0
    assert (np.diff(used.astype(int), axis=1) <= 0).all()
    assert (np.diff(positions, axis=1)[used[:, 1:]] > 0).all()  # each position once, in order
    assert (labels[used] >= 5).all()
    assert not labels[~used].any()
    assert (positions < lengths[:, None]).all()
    tokens = np.take_along_axis(samples["tokens"], positions.astype(np.int64), 1)[used]
    masked, kept = tokens == 4, tokens == labels[used]
    assert masked.mean() == pytest.approx(0.8, abs=0.02)
    assert kept.mean() == pytest.approx(0.1, abs=0.02)
    random = tokens[~masked & ~kept]
    assert not np.isin(random, [0, 2, 3, 4]).any()
    assert len(set(random.tolist())) > 0.7 * min(len(random), DOCUMENTS * WORDS)
    # All positions of a sample are equally likely.
    full = lengths == 128
    hits = np.bincount(positions[full][used[full]], minlength=128)[1:127] / full.sum()
    assert abs(hits[:40].mean() - hits[80:].mean()) < 0.02


def test_whole_word_mask_masks_all_tokens_of_a_word(vocab: TokenizerSpec) -> None:
    options = BertOptions(vocab, 64, 10, dupe_factor=3, whole_word_mask=True)
    samples, is_continuation = make_batch(options, make_text()), load_bert_tokenizer(vocab)[1].is_continuation
    assert is_continuation[5:].mean() == pytest.approx(1 / 3)
    tokens = original_tokens(samples)
    for row, positions in zip(tokens, samples["masked_positions"], strict=True):
        masked = set(positions[positions > 0].tolist())
        for column in range(2, 64):
            if is_continuation[row[column]] and row[column - 1] >= 5:
                assert (column in masked) == (column - 1 in masked)


def test_duplicates_have_different_masks(vocab: TokenizerSpec) -> None:
    one, two = (make_batch(BertOptions(vocab, 64, 10, dupe_factor=n), make_text()) for n in (1, 2))
    assert 1.8 < len(two["tokens"]) / len(one["tokens"]) < 2.2
    assert len({row.tobytes() for row in two["tokens"]}) == len(two["tokens"])
    again = make_batch(BertOptions(vocab, 64, 10, dupe_factor=2), make_text())
    assert all(np.array_equal(two[name], again[name]) for name in two)
    for options, chunk_id in (
        (BertOptions(vocab, 64, 10, dupe_factor=2, seed=1), 0),
        (BertOptions(vocab, 64, 10, dupe_factor=2), 1),
    ):
        assert make_batch(options, make_text(), chunk_id)["tokens"].tobytes() != two["tokens"].tobytes()


def test_sentences_and_documents_without_tokens_are_left_out(vocab: TokenizerSpec) -> None:
    tokenizer = load_bert_tokenizer(vocab)[0]
    word = spell(0)
    text = tokenize_documents(tokenizer, [[], [word, "", f"{word} {word}"], [""], [" ", word]])
    assert text.sentence_bounds == [0, 1, 3, 4]
    assert text.document_bounds == [0, 2, 3]
    empty = tokenize_documents(tokenizer, [[], [""]])
    assert len(make_batch(BertOptions(vocab, 64, 10), empty)["tokens"]) == 0


def test_output_does_not_depend_on_workers(
    vocab: TokenizerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "SLICE_BYTES", 1 << 13)
    inputs = [write_json_lines(tmp_path / "a.jsonl")]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(inputs[0].read_bytes()))
    inputs.append(tmp_path / "b.jsonl.gz")
    assert len(list(document_chunks(inputs))) > 5
    options = BertOptions(vocab, 64, 10, dupe_factor=2, whole_word_mask=True)
    results = [build(inputs, options, tmp_path / f"by{workers}", workers, files=3) for workers in (1, 3)]
    assert results[0] == results[1]
    names = [f"x_training_0000{number}.hdf5" for number in range(3)]
    assert sorted(path.name for path in (tmp_path / "by1").iterdir()) == names
    for name in names:
        assert (tmp_path / "by1" / name).read_bytes() == (tmp_path / "by3" / name).read_bytes()
    other = build(inputs, options._replace(seed=1), tmp_path / "other", files=3)[0]
    assert other.documents == results[0][0].documents
    assert (tmp_path / "other" / names[0]).read_bytes() != (tmp_path / "by1" / names[0]).read_bytes()


def test_files_have_the_reference_format_and_equal_sizes(
    vocab: TokenizerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "SLICE_BYTES", 1 << 13)
    source = write_json_lines(tmp_path / "a.jsonl")
    counts, _ = build([source], BertOptions(vocab, 64, 10), tmp_path / "out", files=7)
    paths = sorted((tmp_path / "out").glob("*_training_*.hdf5"))
    assert counts.files == len(paths) == 7
    sizes = []
    for path in paths:
        with h5py.File(path) as file:
            assert set(file) == set(DATASETS)
            for name, (dtype, dimensions) in DATASETS.items():
                assert file[name].dtype == np.dtype(dtype)
                assert file[name].ndim == dimensions
                assert file[name].compression == "gzip"
            sizes.append(len(file["input_ids"]))
            assert file["input_ids"].shape[1] == 64
            assert file["masked_lm_positions"].shape[1] == 10
    assert sum(sizes) == counts.samples
    assert max(sizes) - min(sizes) <= 1
    # No sample is lost or duplicated, and each file has samples of all parts of the input.
    single = build([source], BertOptions(vocab, 64, 10), tmp_path / "one")[0]
    assert (single.samples, single.files) == (counts.samples, 1)
    rows = [
        sorted(row.tobytes() for row in BertHdf5Dataset(files, 64, 10).samples(np.arange(counts.samples))["tokens"])
        for files in (paths, [tmp_path / "one" / "x_training_00000.hdf5"])
    ]
    assert rows[0] == rows[1]
    first = BertHdf5Dataset(paths[:1], 64, 10)
    tokens = first.samples(np.arange(len(first)))["tokens"]
    assert len(set((tokens[tokens >= 5] - 5) // WORDS)) > 0.8 * DOCUMENTS


def test_text_files_and_unreadable_lines(vocab: TokenizerSpec, tmp_path: Path) -> None:
    for number in range(5):
        lines = json.loads(write_json_lines(tmp_path / "a.jsonl").read_text().splitlines()[number])["text"]
        (tmp_path / f"{number}.txt").write_text(lines)
    malformed = tmp_path / "bad.jsonl"
    malformed.write_text('{"text": "' + spell(0) + '"}\nnot JSON\n{"other": 1}\n')
    counts, unreadable = build(
        [*sorted(tmp_path.glob("*.txt")), malformed], BertOptions(vocab, 64, 10), tmp_path / "out"
    )
    assert counts.documents == 6
    locations = [(record.path, record.location) for record in unreadable]
    assert locations == [(malformed, "line 2"), (malformed, "line 3")]
    dataset = BertHdf5Dataset([tmp_path / "out" / "x_training_00000.hdf5"], 64, 10)
    assert dataset.samples(np.arange(len(dataset)))["next_sentence_labels"].any()


def test_impossible_requests_are_refused(vocab: TokenizerSpec, tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", 3)
    with pytest.raises(UserError, match=r"--files 5000: the input gives \d+ samples; nearest"):
        build([source], BertOptions(vocab, 64, 10), tmp_path / "out", files=5000)
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(UserError, match=r"no \[PAD\]"):
        build([source], BertOptions(TokenizerSpec("bytes"), 64, 10), tmp_path / "out")
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(UserError, match="too few for a sample"):
        build([tmp_path / "empty.jsonl"], BertOptions(vocab, 64, 10), tmp_path / "out")
    build([source], BertOptions(vocab, 64, 10), tmp_path / "out", files=3)
    with pytest.raises(UserError, match=r"x_training_00000\.hdf5: already exists; --overwrite"):
        build([source], BertOptions(vocab, 64, 10), tmp_path / "out")
    target = BertFileSet(tmp_path / "out", "x", 2, overwrite=True)
    build_bert_files([source], ["text"], BertOptions(vocab, 64, 10), target, 1, print, ProgressDisplay)
    assert len(list((tmp_path / "out").iterdir())) == 2
    (tmp_path / "out" / ".x_training.part").mkdir()  # a run was killed while it renamed its files
    build([source], BertOptions(vocab, 64, 10), tmp_path / "out", files=1)


def command(source: Path, out: Path, vocab: TokenizerSpec, *flags: str) -> list[str]:
    files = ["--input", str(source), "--output", str(out), "--vocab-file", str(vocab.vocab_file), "--name", "x"]
    return ["bert", *files, "--seq-len", "64", "--max-predictions", "10", *flags]


@pytest.mark.parametrize("kill_at", [pytest.param("5", marks=pytest.mark.nightly), "3.hdf5"])
def test_killed_run_leaves_no_files_and_can_be_repeated(
    vocab: TokenizerSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str], kill_at: str
) -> None:
    source, out = write_json_lines(tmp_path / "a.jsonl", 160), tmp_path / "out"
    arguments = command(source, out, vocab, "--workers", "2", "--files", "20", "--duplicate", "2")
    program = (
        "from trainyard.data.formats import documents; documents.SLICE_BYTES = 8192\n"
        "from trainyard.cli.commands.data import app; app()"
    )
    process = subprocess.Popen([sys.executable, "-c", program, *arguments])
    work_directory = out / ".x_training.part"
    end = time.monotonic() + 60
    while not (work_directory / kill_at).exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert work_directory.exists(), "the run ended before the kill"
    assert not list(out.glob("*.hdf5"))
    app(arguments, standalone_mode=False)
    assert not work_directory.exists()
    paths = sorted(out.glob("x_training_*.hdf5"))
    assert len(paths) == 20
    count = len(BertHdf5Dataset(paths, 64, 10))
    assert f"160 documents, {count:,} samples, 20 files in " in capsys.readouterr().out


@pytest.mark.parametrize("existing", [False, True])
def test_a_part_of_a_set_is_never_read(vocab: TokenizerSpec, tmp_path: Path, existing: bool) -> None:
    """A kill before each change of the file system while files get their names: the set is complete, absent, or refused
    until the command runs again."""
    source, out = write_json_lines(tmp_path / "a.jsonl", 20), tmp_path / "out"
    target = BertFileSet(out, "x", 3, overwrite=existing)
    write = partial(build_bert_files, [source], ["text"], BertOptions(vocab, 64, 10), target, 1, print, ProgressDisplay)
    (old := tmp_path / "old").mkdir()
    if existing:
        build_bert_files(
            [source], ["text"], BertOptions(vocab, 64, 10), BertFileSet(old, "x", 3), 1, print, ProgressDisplay
        )
    refused = 0
    for change in range(1, 100):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(old, out)
        if not killed_before_change(write, change):
            break
        paths = sorted(out.glob("x_training_*.hdf5"))
        if (out / ".x_training.part" / "unnamed").exists():
            for path in paths:
                refused += 1
                with pytest.raises(UserError, match=r"its set is not complete: `trainyard data bert` was interrupted"):
                    bert_hdf5.read_shape(path)
        else:
            assert len(paths) == 3 or not (paths or existing)
            assert all(bert_hdf5.read_shape(path).num_samples for path in paths)
        if change % 5 == 0:
            write()
            assert len(list(out.iterdir())) == 3
            assert all(bert_hdf5.read_shape(path).num_samples for path in sorted(out.iterdir()))
    assert refused >= 2


def test_second_run_with_the_same_output_is_refused(vocab: TokenizerSpec, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from trainyard.prepare.bert_files import BertFileSet, work_directory\n"
        "with work_directory(BertFileSet(Path(sys.argv[1]), 'x')): print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match="another run is writing there"):
            build([write_json_lines(tmp_path / "a.jsonl", 3)], BertOptions(vocab, 64, 10), tmp_path)
        process.communicate()
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_user_mistakes_are_one_line_errors(
    vocab: TokenizerSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_json_lines(tmp_path / "a.jsonl", 5), tmp_path / "out"
    source.write_text(source.read_text() + "{broken\n")
    with pytest.raises(UserError, match=f"{source}: line 6: not JSON"):
        app(command(source, out, vocab, "--strict", "--workers", "2"), standalone_mode=False)
    assert not list(out.iterdir())
    app(command(source, out, vocab), standalone_mode=False)
    captured = capsys.readouterr()
    assert f"skipped: {source}: line 6: not JSON" in captured.err
    assert "5 documents" in captured.out
    assert "1 line skipped" in captured.out
    for flags, message in (
        (["--max-predictions", "62"], "--max-predictions 62: --seq-len 64 allows at most 61"),
        (["--tokenizer", "t.json"], "cannot be combined with --vocab-file"),
        (["--name", "a/b"], "--name a/b"),
    ):
        with pytest.raises(UserError, match=message):
            app(command(source, out, vocab, *flags), standalone_mode=False)


def test_phases_set_seq_len_and_predictions(vocab: TokenizerSpec, tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", 5)
    for phase, shapes in ((1, (128, 20)), (2, (512, 80))):
        arguments = ["bert", "--input", str(source), "--output", str(tmp_path / "out"), "--workers", "1"]
        arguments += ["--vocab-file", str(vocab.vocab_file), "--phase", str(phase), "--name", f"p{phase}"]
        app(arguments, standalone_mode=False)
        assert len(BertHdf5Dataset([tmp_path / "out" / f"p{phase}_training_00000.hdf5"], *shapes))
