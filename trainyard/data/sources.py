"""Where samples come from. A source numbers its samples and gives any of them; their order is not its business."""

import glob
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from trainyard.config.schema import Config
from trainyard.data.story import stories
from trainyard.data.tokenizer import open_tokenizer, spec_of
from trainyard.errors import UserError
from trainyard.random import cell32, key32, key64, row32

Sample = dict[str, NDArray[np.int32]]
Say = Callable[[str], None]

CLS, SEP, MASK, FIRST_WORD = 1, 2, 3, 4
"""Numbers with a meaning in synthetic masked samples; 0 is padding."""
STORIES = 1500
WORDS = 64
"""Length of synthetic documents, on average."""


class Source(Protocol):
    def __len__(self) -> int: ...

    def samples(self, numbers: NDArray[np.int64]) -> Sample:
        """The samples of these numbers, stacked: each array is [len(numbers), ...]."""


class Tokens:
    """One long row of tokens, cut into samples of `sequence` inputs and as many labels, one further on. With `end`,
    documents that end with that token are kept apart."""

    def __init__(self, tokens: NDArray[np.int32], sequence: int, end: int | None = None) -> None:
        self.tokens = tokens
        self.sequence = sequence
        self.end = end

    def __len__(self) -> int:
        return max((len(self.tokens) - 1) // self.sequence, 0)

    def samples(self, numbers: NDArray[np.int64]) -> Sample:
        rows = self.tokens[numbers[:, None] * self.sequence + np.arange(self.sequence + 1)]
        return {"tokens": rows[:, :-1], "labels": rows[:, 1:], **apart(rows[:, :-1], self.end)}


def apart(tokens: NDArray[np.int32], end: int | None) -> Sample:
    """Which document of its sample each token is in, and its position there; nothing where `end` is None."""
    if end is None:
        return {}
    starts = np.zeros_like(tokens, dtype=bool)
    starts[:, 1:] = tokens[:, :-1] == end
    place = np.arange(tokens.shape[1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(starts, place, 0), axis=1)
    return {"documents": starts.cumsum(1, dtype=np.int32), "positions": (place - first).astype(np.int32)}


class SyntheticTokens:
    """Token rows without files: each follows from its number. Part of every next token is predictable. Kept apart,
    documents have 1 / `WORDS` of a chance to end at each token."""

    def __init__(self, config: Config) -> None:
        self.vocab, self.sequence = config.model.vocab, config.data.sequence
        self.seed = config.train.seed
        self.separate = config.data.separate

    def __len__(self) -> int:
        return 1 << 24

    def samples(self, numbers: NDArray[np.int64]) -> Sample:
        rows = np.empty((len(numbers), self.sequence + 1), dtype=np.int32)
        for row, number in zip(rows, numbers, strict=True):
            draw = np.random.Generator(np.random.Philox(key64(self.seed, "tokens", number) % 2**64))
            row[:] = draw.integers(0, self.vocab, self.sequence + 1)
            row[1::2] = (row[:-1:2] * 7 + 1) % self.vocab
            if self.separate:
                row[draw.random(len(row)) < 1 / WORDS] = 0
        return {"tokens": rows[:, :-1], "labels": rows[:, 1:], **apart(rows[:, :-1], 0 if self.separate else None)}


class SyntheticPairs:
    """Masked sentence pairs without files, shaped like BERT's: [CLS] a [SEP] b [SEP] and padding; 80 % of the chosen
    places masked, 10 % random, 10 % kept. In a true pair, b goes on where a ended."""

    def __init__(self, config: Config) -> None:
        if config.model.vocab < 2 * FIRST_WORD:
            raise UserError(
                f"model.vocab={config.model.vocab}: too small for masked samples; nearest: {2 * FIRST_WORD}"
            )
        self.words = config.model.vocab - FIRST_WORD
        self.sequence, self.places = config.data.sequence, config.data.predictions
        self.seed = config.train.seed

    def __len__(self) -> int:
        return 1 << 24

    def samples(self, numbers: NDArray[np.int64]) -> Sample:
        draw = self._draws(numbers)
        room, places = self.sequence - 3, self.places
        least = max(room // 2, min(2, room))
        words_B1 = least + draw(1) % (room + 1 - least)
        cut_B1 = words_B1 // 2
        first_B1, apart_B1, jump_B1 = draw(1) % self.words, draw(1) % 2, 1 + draw(1) % (self.words - 1)
        at_T = np.arange(self.sequence)
        second_BT = at_T > cut_B1 + 1
        number_BT = at_T - 1 - second_BT  # runs of neighbouring words
        text_BT = FIRST_WORD + (first_B1 + number_BT + second_BT * apart_B1 * jump_B1) % self.words
        ends_BT = (at_T == cut_B1 + 1) | (at_T == words_B1 + 2)
        used_BT = at_T <= words_B1 + 2
        row_BT = np.where(ends_BT, SEP, text_BT) * used_BT
        row_BT[:, 0] = CLS
        word_BT = used_BT & ~ends_BT & (at_T > 0)
        # The words with the lowest of random numbers are chosen.
        order_BT = np.where(word_BT, draw(self.sequence), np.iinfo(np.int64).max).argsort(1)
        count_B1 = np.minimum(np.maximum(np.rint(0.15 * words_B1).astype(np.int64), 1), np.minimum(places, words_B1))
        counted_BP = np.arange(places) < count_B1
        place_BP = np.pad(order_BT[:, :places], ((0, 0), (0, max(places - self.sequence, 0))))
        place_BP = np.sort(np.where(counted_BP, place_BP, self.sequence), 1)  # those that do not count come last
        place_BP = np.where(counted_BP, place_BP, 0)
        label_BP = np.take_along_axis(row_BT, place_BP, 1)
        what_BP, other_BP = draw(places) % 10, FIRST_WORD + draw(places) % self.words
        new_BP = np.where(what_BP < 8, MASK, np.where(what_BP == 9, other_BP, label_BP))
        rows_B, columns_P = np.nonzero(counted_BP)
        row_BT[rows_B, place_BP[rows_B, columns_P]] = new_BP[rows_B, columns_P]
        found = {
            "tokens": row_BT,
            "segments": second_BT & used_BT,
            "mask": used_BT,
            "places": place_BP,
            "labels": np.where(counted_BP, label_BP, -100),
            "next_sentence": apart_B1[:, 0],
        }
        return {name: array.astype(np.int32) for name, array in found.items()}

    def _draws(self, numbers: NDArray[np.int64]) -> Callable[[int], NDArray[np.int64]]:
        """Columns of numbers from 0 to 2^31 for each sample, new ones at each call."""
        key = torch.tensor(key32(self.seed, "pairs"), dtype=torch.int32)
        number = torch.from_numpy(numbers.astype(np.int32))
        a, b = row32(key, number, torch.zeros_like(number))
        site = torch.zeros((), dtype=torch.int32)
        drawn = 0

        def draw(columns: int) -> NDArray[np.int64]:
            nonlocal drawn
            column = torch.arange(drawn, drawn + columns, dtype=torch.int32)
            drawn += columns
            cells = cell32((a[:, None], b[:, None]), site, column) & 0x7FFFFFFF
            out: NDArray[np.int64] = cells.numpy().astype(np.int64)
            return out

        return draw


class Part:
    """The samples of another source from `first` on: one side of a split."""

    def __init__(self, source: Source, first: int, count: int) -> None:
        self.source, self.first, self.count = source, first, count

    def __len__(self) -> int:
        return self.count

    def samples(self, numbers: NDArray[np.int64]) -> Sample:
        return self.source.samples(numbers + self.first)


def open_sources(config: Config, say: Say = lambda line: None) -> tuple[Source, Source | None]:
    """The training samples, and the held-out ones if data.validation asks for them."""
    whole: Source
    if config.data.source == "synthetic":
        whole = SyntheticPairs(config) if config.model.family == "bert" else SyntheticTokens(config)
    else:
        tokens, end = read_tokens(config, say)
        whole = Tokens(tokens, config.data.sequence, end if config.data.separate else None)
    held = round(len(whole) * config.data.validation)
    if config.data.validation:
        held = max(held, 1)
    if len(whole) - held < 1:
        raise UserError(
            f"data.sequence={config.data.sequence}: the text gives {len(whole)} samples; use more text or a shorter one"
        )
    return Part(whole, 0, len(whole) - held), Part(whole, len(whole) - held, held) if held else None


def read_tokens(config: Config, say: Say) -> tuple[NDArray[np.int32], int]:
    """Every document through the tokenizer, the end token after each; and that token."""
    data = config.data
    tokenizer = open_tokenizer(spec_of(data))
    if tokenizer.vocab > config.model.vocab:
        raise UserError(
            f"model.vocab={config.model.vocab}: the tokenizer has {tokenizer.vocab} tokens; nearest: {tokenizer.vocab}"
        )
    pieces: list[NDArray[np.int32]] = []
    end = np.asarray([tokenizer.end], dtype=np.int32)
    if not data.paths:
        if data.tokenizer != "bytes":
            raise UserError(
                "data.paths: missing; name the text files (or use data.tokenizer=bytes for the built-in text)"
            )
        tokens, counts = tokenizer.encode(stories(STORIES))
        pieces.append(np.insert(tokens, np.cumsum(counts), tokenizer.end))
    for path in _files(data.paths):
        say(f"reading {path}")
        try:
            pieces += [tokenizer.encode([path.read_text(encoding="utf-8")])[0], end]
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from None
    return np.concatenate(pieces), tokenizer.end


def _files(paths: tuple[str, ...]) -> list[Path]:
    found: list[Path] = []
    for pattern in paths:
        matches = sorted(glob.glob(str(Path(pattern).expanduser())))
        files = [Path(match) for match in matches if Path(match).is_file()]
        if not files:
            raise UserError(f"data.paths={pattern}: no such file; give text files, or --smoke for a trial without data")
        found += files
    return found
