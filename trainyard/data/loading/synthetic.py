"""Samples without files, for trials and benchmarks: each follows from its number."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from trainyard.config.schema import Config
from trainyard.core.counter_rng import element_bits, key32, key64, row_seeds
from trainyard.core.errors import UserError
from trainyard.data.loading.dataset import Sample
from trainyard.data.loading.token_samples import document_ids

CLS, SEP, MASK, FIRST_WORD_ID = 1, 2, 3, 4
"""Numbers with a meaning in masked samples; 0 is padding."""
MEAN_DOCUMENT_TOKENS = 64
"""Length of documents, on average."""


class SyntheticTokens:
    """Token rows without files: each follows from its number. Part of every next token is predictable. Kept apart,
    documents have 1 / `WORDS` of a chance to end at each token."""

    def __init__(self, config: Config) -> None:
        self.vocab_size, self.seq_len = config.model.vocab, config.data.seq_len
        self.seed = config.train.seed
        self.document_mask = config.data.document_mask

    def __len__(self) -> int:
        return 1 << 24

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        rows = np.empty((len(indices), self.seq_len + 1), dtype=np.int32)
        for row, number in zip(rows, indices, strict=True):
            draw = np.random.Generator(np.random.Philox(key64(self.seed, "tokens", number) % 2**64))
            row[:] = draw.integers(0, self.vocab_size, self.seq_len + 1)
            row[1::2] = (row[:-1:2] * 7 + 1) % self.vocab_size
            if self.document_mask:
                row[draw.random(len(row)) < 1 / MEAN_DOCUMENT_TOKENS] = 0
        out = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
        if self.document_mask:
            begins = np.zeros((len(rows), self.seq_len), np.bool_)
            begins[:, 1:] = rows[:, :-2] == 0
            out |= document_ids(begins)
        return out


class SyntheticSentencePairs:
    """Masked sentence pairs without files, shaped like BERT's: [CLS] a [SEP] b [SEP] and padding; 80 % of the chosen
    places masked, 10 % random, 10 % kept. In a true pair, b goes on where a ended."""

    def __init__(self, config: Config) -> None:
        if config.model.vocab < 2 * FIRST_WORD_ID:
            raise UserError(
                f"model.vocab={config.model.vocab}: too small for masked samples; nearest: {2 * FIRST_WORD_ID}"
            )
        self.num_words = config.model.vocab - FIRST_WORD_ID
        self.seq_len, self.max_predictions = config.data.seq_len, config.data.max_predictions
        self.seed = config.train.seed

    def __len__(self) -> int:
        return 1 << 24

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        draw = self._random_columns(indices)
        room, places = self.seq_len - 3, self.max_predictions
        least = max(room // 2, min(2, room))
        words_B1 = least + draw(1) % (room + 1 - least)
        cut_B1 = words_B1 // 2
        first_B1, apart_B1, jump_B1 = draw(1) % self.num_words, draw(1) % 2, 1 + draw(1) % (self.num_words - 1)
        at_T = np.arange(self.seq_len)
        second_BT = at_T > cut_B1 + 1
        number_BT = at_T - 1 - second_BT  # runs of neighbouring words
        text_BT = FIRST_WORD_ID + (first_B1 + number_BT + second_BT * apart_B1 * jump_B1) % self.num_words
        ends_BT = (at_T == cut_B1 + 1) | (at_T == words_B1 + 2)
        used_BT = at_T <= words_B1 + 2
        row_BT = np.where(ends_BT, SEP, text_BT) * used_BT
        row_BT[:, 0] = CLS
        word_BT = used_BT & ~ends_BT & (at_T > 0)
        # The words with the lowest of random numbers are chosen.
        order_BT = np.where(word_BT, draw(self.seq_len), np.iinfo(np.int64).max).argsort(1)
        count_B1 = np.minimum(np.maximum(np.rint(0.15 * words_B1).astype(np.int64), 1), np.minimum(places, words_B1))
        counted_BP = np.arange(places) < count_B1
        place_BP = np.pad(order_BT[:, :places], ((0, 0), (0, max(places - self.seq_len, 0))))
        place_BP = np.sort(np.where(counted_BP, place_BP, self.seq_len), 1)  # those that do not count come last
        place_BP = np.where(counted_BP, place_BP, 0)
        label_BP = np.take_along_axis(row_BT, place_BP, 1)
        what_BP, other_BP = draw(places) % 10, FIRST_WORD_ID + draw(places) % self.num_words
        new_BP = np.where(what_BP < 8, MASK, np.where(what_BP == 9, other_BP, label_BP))
        rows_B, columns_P = np.nonzero(counted_BP)
        row_BT[rows_B, place_BP[rows_B, columns_P]] = new_BP[rows_B, columns_P]
        found = {
            "tokens": row_BT,
            "segment_ids": second_BT & used_BT,
            "attention_mask": used_BT,
            "masked_positions": place_BP,
            "labels": np.where(counted_BP, label_BP, -100),
            "next_sentence_labels": apart_B1[:, 0],
        }
        return {name: array.astype(np.int32) for name, array in found.items()}

    def _random_columns(self, numbers: NDArray[np.int64]) -> Callable[[int], NDArray[np.int64]]:
        """Columns of numbers from 0 to 2^31 for each sample, new ones at each call."""
        key = torch.tensor(key32(self.seed, "pairs"), dtype=torch.int32)
        number = torch.from_numpy(numbers.astype(np.int32))
        a, b = row_seeds(key, number, torch.zeros_like(number))
        site = torch.zeros((), dtype=torch.int32)
        drawn = 0

        def draw(columns: int) -> NDArray[np.int64]:
            nonlocal drawn
            column = torch.arange(drawn, drawn + columns, dtype=torch.int32)
            drawn += columns
            cells = element_bits((a[:, None], b[:, None]), site, column) & 0x7FFFFFFF
            out: NDArray[np.int64] = cells.numpy().astype(np.int64)
            return out

        return draw
