"""BERT's samples: what a pair is, what is masked, and the same bytes by any number of workers and after a kill."""

import gzip
import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from trainyard.cli.console import ProgressDisplay
from trainyard.cli.data import app
from trainyard.core.errors import UserError
from trainyard.data.formats import documents
from trainyard.data.formats.bert_hdf5_cache import BertHdf5Dataset
from trainyard.data.formats.documents import UnreadableRecord
from trainyard.data.prepare.bert_files import BertCounts, BertFileSet, build_bert_files, document_chunks
from trainyard.data.prepare.bert_samples import (
    BertOptions,
    TokenizedText,
    load_bert_tokenizer,
    make_pairs,
    make_samples,
    tokenize_documents,
)
from trainyard.data.text.tokenizer import TokenizerSpec

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
DOCUMENTS, WORDS = 40, 300
"""Every word of every document is a token of its own: a token tells where it comes from."""
DATASETS = {
    "input_ids": ("i4", 2),
    "input_mask": ("i1", 2),
    "segment_ids": ("i1", 2),
    "masked_lm_positions": ("i4", 2),
    "masked_lm_ids": ("i4", 2),
    "next_sentence_labels": ("i1", 1),
}
Batch = dict[str, NDArray[np.int32]]


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> TokenizerSpec:
    """Word n of document m is the token 5 + m * WORDS + n; every third goes on with the word before it."""
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    words = [f"{'##' if n % 3 == 2 else ''}{letters(m * WORDS + n)}" for m in range(DOCUMENTS) for n in range(WORDS)]
    path.write_text("\n".join([*SPECIAL, *words]) + "\n")
    return TokenizerSpec("wordpiece", str(path))


def letters(number: int) -> str:
    """Of one length, so that no word begins another."""
    return "".join(chr(ord("a") + number // 26**place % 26) for place in range(4)) + "z"


def text(seed: int = 0) -> TokenizedText:
    """Documents of sentences of 3 to 30 words; few words are in a last sentence."""
    draw = np.random.default_rng(seed)
    ends, firsts = [0], [0]
    for number in range(DOCUMENTS):
        while ends[-1] < (number + 1) * WORDS:
            ends.append(min(ends[-1] + int(draw.integers(3, 31)), (number + 1) * WORDS))
        firsts.append(len(ends) - 1)
    return TokenizedText(np.arange(5, 5 + DOCUMENTS * WORDS, dtype=np.int32), ends, firsts)


def jsonl(path: Path, count: int = DOCUMENTS) -> Path:
    """The same words as documents of two lines, in sentences of twelve."""
    lines = []
    for number in range(count):
        words = [letters(number % DOCUMENTS * WORDS + n) for n in range(WORDS)]
        joined = [f"{words[n]} {words[n + 1]}{words[n + 2]}" for n in range(0, WORDS, 3)]
        sentences = [" ".join(joined[n : n + 4]).capitalize() + "." for n in range(0, len(joined), 4)]
        lines.append(json.dumps({"text": " ".join(sentences[:10]) + "\n" + " ".join(sentences[10:])}))
    path.write_text("\n".join(lines) + "\n")
    return path


def batch(recipe: BertOptions, found: TokenizedText, chunk: int = 0) -> Batch:
    """Samples of a text by name."""
    records = make_samples(found, recipe, load_bert_tokenizer(recipe.tokenizer)[1], chunk)
    bits = {
        name: np.unpackbits(records[name], axis=1, count=recipe.seq_len).astype(np.int32)
        for name in ("attention_mask", "segment_ids")
    }
    return {**{name: records[name].astype(np.int32) for name in records.dtype.names if name not in bits}, **bits}


def unmasked(found: Batch) -> NDArray[np.int32]:
    tokens = found["tokens"].copy()
    rows, columns = np.nonzero(found["masked_positions"])
    tokens[rows, found["masked_positions"][rows, columns]] = found["labels"][rows, columns]
    return tokens


def made(
    inputs: list[Path], recipe: BertOptions, directory: Path, workers: int = 1, files: int | None = None
) -> tuple[BertCounts, list[UnreadableRecord]]:
    directory.mkdir(exist_ok=True)
    bad: list[UnreadableRecord] = []
    counts = build_bert_files(
        inputs, ["text"], recipe, BertFileSet(directory, "x", files), workers, bad.append, ProgressDisplay
    )
    assert [path for path in directory.iterdir() if not path.name.endswith(".hdf5")] == []
    return counts, bad


def test_samples_are_two_segments_between_special_tokens(vocab: TokenizerSpec) -> None:
    found = batch(BertOptions(vocab, 64, 10, dupe_factor=3), text())
    tokens, mask, segments = unmasked(found), found["attention_mask"], found["segment_ids"]
    lengths = mask.sum(1)
    assert (np.diff(mask, axis=1) <= 0).all()
    assert (tokens[:, 0] == 2).all()
    assert (tokens[mask == 0] == 0).all()
    assert (segments[mask == 0] == 0).all()
    assert lengths.max() == 64
    assert ((tokens == 3).sum(1) == 2).all()
    assert ((tokens >= 5).sum(1) == lengths - 3).all()
    for row, length, kind in zip(tokens, lengths, segments, strict=True):
        first, second = np.flatnonzero(row == 3)
        assert second == length - 1
        assert first >= 2
        assert second >= first + 2
        assert kind.tolist() == [0] * (first + 1) + [1] * (second - first) + [0] * (64 - length)


def test_a_true_pair_is_one_run_of_text_and_a_random_one_is_of_two_documents(vocab: TokenizerSpec) -> None:
    found = batch(BertOptions(vocab, 64, 10, dupe_factor=4), text())
    checked = 0
    for row, length, apart in zip(
        unmasked(found), found["attention_mask"].sum(1), found["next_sentence_labels"], strict=True
    ):
        first, second = np.flatnonzero(row == 3)
        a, b = row[1:first] - 5, row[first + 1 : second] - 5
        assert (np.diff(a) == 1).all()
        assert (np.diff(b) == 1).all()
        assert (a[0] // WORDS != b[0] // WORDS) == apart
        if not apart:
            assert b[0] > a[-1]
            if length < 64:  # nothing was cut off between them
                assert b[0] == a[-1] + 1
                checked += 1
    assert checked > 30


def test_segments_begin_and_end_where_sentences_do(vocab: TokenizerSpec) -> None:
    found = text()
    borders = set(found.sentence_bounds)
    recipe = BertOptions(vocab, 64, 10, short_seq_prob=0)
    all_pairs = list(make_pairs(found, recipe, np.random.default_rng(0)))
    for a, a_end, b, b_end, apart in all_pairs:
        assert {a, a_end, b, b_end} <= borders
        assert a < a_end
        assert b < b_end
        assert apart or b == a_end
    # Every sentence is used: those that a random pair leaves out begin the next one.
    covered = sorted(
        {(a, a_end) for a, a_end, *_ in all_pairs} | {(b, e) for _, _, b, e, apart in all_pairs if not apart}
    )
    assert covered[0][0] == 0
    assert covered[-1][1] == found.sentence_bounds[-1]
    assert all(end == start for (_, end), (start, _) in pairwise(covered))


def test_half_of_the_pairs_are_random(vocab: TokenizerSpec) -> None:
    found = text()
    long = [
        pair
        for seed in range(10)
        for pair in make_pairs(found, BertOptions(vocab, 128, 20), np.random.default_rng(seed))
    ]
    chance = np.mean([apart for *_, apart in long])
    assert 0.5 < chance < 0.65  # more than half, as a sentence that is left alone has only a random partner
    others = {b // WORDS for _, _, b, _, apart in long if apart}
    assert others == set(range(DOCUMENTS))


def test_one_document_in_ten_gives_short_samples(vocab: TokenizerSpec) -> None:
    lengths = [
        batch(BertOptions(vocab, 128, 20, short_seq_prob=short), text(), 1)["attention_mask"].sum(1)
        for short in (0.0, 0.1, 1.0)
    ]
    below = [(each < 90).mean() for each in lengths]
    assert below[0] < 0.2 < below[1] < 0.5 < below[2]


def test_a_document_alone_has_true_pairs_only(vocab: TokenizerSpec) -> None:
    whole = text()
    alone = TokenizedText(
        whole.tokens, whole.sentence_bounds[: whole.document_bounds[1] + 1], whole.document_bounds[:2]
    )
    found = batch(BertOptions(vocab, 64, 10), alone)
    assert len(found["tokens"]) > 2
    assert not found["next_sentence_labels"].any()


@pytest.mark.parametrize("whole_word", [False, True])
def test_masks_are_fifteen_percent_in_three_kinds(vocab: TokenizerSpec, whole_word: bool) -> None:
    found = batch(BertOptions(vocab, 128, 20, short_seq_prob=0.2, dupe_factor=20, whole_word_mask=whole_word), text())
    places, labels, lengths = found["masked_positions"], found["labels"], found["attention_mask"].sum(1)
    counts = (places > 0).sum(1)
    wanted = np.clip(np.rint(0.15 * lengths), 1, 20)
    assert (counts <= wanted).all()
    if not whole_word:
        assert (counts == wanted).all()
    assert 0.14 < counts.sum() / lengths.sum() < 0.155
    used = places > 0
    assert (np.diff(used.astype(int), axis=1) <= 0).all()
    assert (np.diff(places, axis=1)[used[:, 1:]] > 0).all()  # each place once, in order
    assert (labels[used] >= 5).all()
    assert not labels[~used].any()
    assert (places < lengths[:, None]).all()
    now = np.take_along_axis(found["tokens"], places.astype(np.int64), 1)[used]
    masked, kept = now == 4, now == labels[used]
    assert masked.mean() == pytest.approx(0.8, abs=0.02)
    assert kept.mean() == pytest.approx(0.1, abs=0.02)
    random = now[~masked & ~kept]
    assert not np.isin(random, [0, 2, 3, 4]).any()
    assert len(set(random.tolist())) > 0.7 * min(len(random), DOCUMENTS * WORDS)
    # Every place of a sample is as likely as any other.
    full = lengths == 128
    hits = np.bincount(places[full][used[full]], minlength=128)[1:127] / full.sum()
    assert abs(hits[:40].mean() - hits[80:].mean()) < 0.02


def test_pieces_of_a_word_are_masked_together(vocab: TokenizerSpec) -> None:
    recipe = BertOptions(vocab, 64, 10, dupe_factor=3, whole_word_mask=True)
    found, inside = batch(recipe, text()), load_bert_tokenizer(vocab)[1].inside
    assert inside[5:].mean() == pytest.approx(1 / 3)
    tokens = unmasked(found)
    for row, places in zip(tokens, found["masked_positions"], strict=True):
        chosen = set(places[places > 0].tolist())
        for at in range(2, 64):
            if inside[row[at]] and row[at - 1] >= 5:
                assert (at in chosen) == (at - 1 in chosen)


def test_each_time_has_its_own_masks(vocab: TokenizerSpec) -> None:
    one, two = (batch(BertOptions(vocab, 64, 10, dupe_factor=n), text()) for n in (1, 2))
    assert 1.8 < len(two["tokens"]) / len(one["tokens"]) < 2.2
    assert len({row.tobytes() for row in two["tokens"]}) == len(two["tokens"])
    again = batch(BertOptions(vocab, 64, 10, dupe_factor=2), text())
    assert all(np.array_equal(two[name], again[name]) for name in two)
    for recipe, chunk in (
        (BertOptions(vocab, 64, 10, dupe_factor=2, seed=1), 0),
        (BertOptions(vocab, 64, 10, dupe_factor=2), 1),
    ):
        assert batch(recipe, text(), chunk)["tokens"].tobytes() != two["tokens"].tobytes()


def test_sentences_and_documents_without_tokens_are_left_out(vocab: TokenizerSpec) -> None:
    tokenizer = load_bert_tokenizer(vocab)[0]
    word = letters(0)
    found = tokenize_documents(tokenizer, [[], [word, "", f"{word} {word}"], [""], [" ", word]])
    assert found.sentence_bounds == [0, 1, 3, 4]
    assert found.document_bounds == [0, 2, 3]
    nothing = tokenize_documents(tokenizer, [[], [""]])
    assert len(batch(BertOptions(vocab, 64, 10), nothing)["tokens"]) == 0


def test_workers_do_not_change_a_byte(vocab: TokenizerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "SLICE_BYTES", 1 << 13)
    inputs = [jsonl(tmp_path / "a.jsonl")]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(inputs[0].read_bytes()))
    inputs.append(tmp_path / "b.jsonl.gz")
    assert len(list(document_chunks(inputs))) > 5
    recipe = BertOptions(vocab, 64, 10, dupe_factor=2, whole_word_mask=True)
    results = [made(inputs, recipe, tmp_path / f"by{workers}", workers, files=3) for workers in (1, 3)]
    assert results[0] == results[1]
    names = [f"x_training_0000{number}.hdf5" for number in range(3)]
    assert sorted(path.name for path in (tmp_path / "by1").iterdir()) == names
    for name in names:
        assert (tmp_path / "by1" / name).read_bytes() == (tmp_path / "by3" / name).read_bytes()
    other = made(inputs, recipe._replace(seed=1), tmp_path / "other", files=3)[0]
    assert other.documents == results[0][0].documents
    assert (tmp_path / "other" / names[0]).read_bytes() != (tmp_path / "by1" / names[0]).read_bytes()


def test_files_have_the_names_types_and_sizes_of_the_reference(
    vocab: TokenizerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "SLICE_BYTES", 1 << 13)
    source = jsonl(tmp_path / "a.jsonl")
    counts, _ = made([source], BertOptions(vocab, 64, 10), tmp_path / "out", files=7)
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
    # Samples are neither lost nor doubled on their way, and each file has some of all parts of the input.
    whole = made([source], BertOptions(vocab, 64, 10), tmp_path / "one")[0]
    assert (whole.samples, whole.files) == (counts.samples, 1)
    rows = [
        sorted(row.tobytes() for row in BertHdf5Dataset(each, 64, 10).samples(np.arange(whole.samples))["tokens"])
        for each in (paths, [tmp_path / "one" / "x_training_00000.hdf5"])
    ]
    assert rows[0] == rows[1]
    first = BertHdf5Dataset(paths[:1], 64, 10)
    tokens = first.samples(np.arange(len(first)))["tokens"]
    assert len(set((tokens[tokens >= 5] - 5) // WORDS)) > 0.8 * DOCUMENTS


def test_text_files_and_bad_lines(vocab: TokenizerSpec, tmp_path: Path) -> None:
    for number in range(5):
        lines = json.loads(jsonl(tmp_path / "a.jsonl").read_text().splitlines()[number])["text"]
        (tmp_path / f"{number}.txt").write_text(lines)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "' + letters(0) + '"}\nnot JSON\n{"other": 1}\n')
    counts, wrong = made([*sorted(tmp_path.glob("*.txt")), bad], BertOptions(vocab, 64, 10), tmp_path / "out")
    assert counts.documents == 6
    assert [(each.path, each.location) for each in wrong] == [(bad, "line 2"), (bad, "line 3")]
    source = BertHdf5Dataset([tmp_path / "out" / "x_training_00000.hdf5"], 64, 10)
    assert source.samples(np.arange(len(source)))["next_sentence_labels"].any()


def test_what_cannot_be_made_is_said(vocab: TokenizerSpec, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", 3)
    with pytest.raises(UserError, match=r"--files 5000: there are \d+ samples; nearest"):
        made([source], BertOptions(vocab, 64, 10), tmp_path / "out", files=5000)
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(UserError, match=r"no \[PAD\]"):
        made([source], BertOptions(TokenizerSpec("bytes"), 64, 10), tmp_path / "out")
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(UserError, match="give no sample"):
        made([tmp_path / "empty.jsonl"], BertOptions(vocab, 64, 10), tmp_path / "out")
    made([source], BertOptions(vocab, 64, 10), tmp_path / "out", files=3)
    with pytest.raises(UserError, match=r"x_training_00000\.hdf5: is there already; --overwrite"):
        made([source], BertOptions(vocab, 64, 10), tmp_path / "out")
    target = BertFileSet(tmp_path / "out", "x", 2, overwrite=True)
    build_bert_files([source], ["text"], BertOptions(vocab, 64, 10), target, 1, print, ProgressDisplay)
    assert len(list((tmp_path / "out").iterdir())) == 2
    (tmp_path / "out" / ".x_training.part").mkdir()  # a run was killed while it gave names to its files
    made([source], BertOptions(vocab, 64, 10), tmp_path / "out", files=1)


def flags(source: Path, out: Path, vocab: TokenizerSpec, *words: str) -> list[str]:
    where = ["--input", str(source), "--output", str(out), "--vocab-file", str(vocab.vocab_file), "--name", "x"]
    return ["bert", *where, "--seq-len", "64", "--max-predictions", "10", *words]


@pytest.mark.parametrize("moment", ["5", "3.hdf5"])
def test_a_kill_leaves_nothing_half_done_and_a_new_start_finishes(
    vocab: TokenizerSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str], moment: str
) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", 400), tmp_path / "out"
    words = flags(source, out, vocab, "--workers", "2", "--files", "60", "--duplicate", "4")
    program = "from trainyard.data import documents; documents.PIECE = 8192; from trainyard.cli.data import app; app()"
    process = subprocess.Popen([sys.executable, "-c", program, *words])
    part = out / ".x_training.part"
    end = time.monotonic() + 60
    while not (part / moment).exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert part.exists(), "it was done before the kill"
    assert not list(out.glob("*.hdf5"))
    app(words, standalone_mode=False)
    assert not part.exists()
    paths = sorted(out.glob("x_training_*.hdf5"))
    assert len(paths) == 60
    count = len(BertHdf5Dataset(paths, 64, 10))
    assert f"400 documents, {count:,} samples, 60 files in " in capsys.readouterr().out


def test_only_one_run_works_in_a_place(vocab: TokenizerSpec, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from trainyard.data.prepare.bert_files import Target, workplace\n"
        "with workplace(Target(Path(sys.argv[1]), 'x')): print('in', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "in\n"
        with pytest.raises(UserError, match="another run works there"):
            made([jsonl(tmp_path / "a.jsonl", 3)], BertOptions(vocab, 64, 10), tmp_path)
        process.communicate()
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_the_command_tells_mistakes_in_a_line(
    vocab: TokenizerSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", 5), tmp_path / "out"
    source.write_text(source.read_text() + "{broken\n")
    with pytest.raises(UserError, match=f"{source}: line 6: not JSON"):
        app(flags(source, out, vocab, "--strict", "--workers", "2"), standalone_mode=False)
    assert not list(out.iterdir())
    app(flags(source, out, vocab), standalone_mode=False)
    said = capsys.readouterr()
    assert f"skipped: {source}: line 6: not JSON" in said.err
    assert "5 documents" in said.out
    assert "1 lines skipped" in said.out
    for words, line in (
        (["--max-predictions", "62"], "--max-predictions 62: --seq-len 64 allows at most 61"),
        (["--tokenizer", "t.json"], "leave out --vocab-file"),
        (["--name", "a/b"], "--name a/b"),
    ):
        with pytest.raises(UserError, match=line):
            app(flags(source, out, vocab, *words), standalone_mode=False)


def test_phases_have_their_lengths(vocab: TokenizerSpec, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", 5)
    for phase, shapes in ((1, (128, 20)), (2, (512, 80))):
        words = ["bert", "--input", str(source), "--output", str(tmp_path / "out"), "--workers", "1"]
        words += ["--vocab-file", str(vocab.vocab_file), "--phase", str(phase), "--name", f"p{phase}"]
        app(words, standalone_mode=False)
        assert len(BertHdf5Dataset([tmp_path / "out" / f"p{phase}_training_00000.hdf5"], *shapes))
