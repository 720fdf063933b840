"""Synthetic samples without files, for trials and benchmarks: each sample is a function of its index."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from trainyard.config.data_schema import DataSection
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.counter_rng import element_bits, key32, key64, row_seeds
from trainyard.core.errors import UserError
from trainyard.data.loading.answers import answer_fields
from trainyard.data.loading.packing import at_ends
from trainyard.data.samples import Sample, document_ids

CLS, SEP, MASK, FIRST_WORD_ID = 1, 2, 3, 4
"""Special token ids of masked samples; 0 is padding."""
MEAN_DOCUMENT_TOKENS = 64


class SyntheticTokens:
    """Random tokens, half of which follow from the token before them. With `data.document_mask`, documents end at each
    token with probability 1 / MEAN_DOCUMENT_TOKENS."""

    def __init__(self, data: DataSection, vocab_size: int, seed: int) -> None:
        self.vocab_size, self.seq_len, self.seed = vocab_size, data.seq_len, seed
        self.document_mask = data.document_mask

    def __len__(self) -> int:
        return 1 << 24

    def source(self, index: int) -> str:
        return f"synthetic tokens {index}"

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        windows = np.empty((len(indices), self.seq_len + 1), dtype=np.int32)
        for row, index in zip(windows, indices, strict=True):
            rng = np.random.Generator(np.random.Philox(key64(self.seed, "tokens", index) % 2**64))
            row[:] = rng.integers(0, self.vocab_size, self.seq_len + 1)
            row[1::2] = (row[:-1:2] * 7 + 1) % self.vocab_size
            if self.document_mask:
                row[rng.random(len(row)) < 1 / MEAN_DOCUMENT_TOKENS] = 0
        sample = {"tokens": windows[:, :-1], "labels": windows[:, 1:]}
        if self.document_mask:
            starts = np.zeros((len(windows), self.seq_len), np.bool_)
            starts[:, 1:] = windows[:, :-2] == 0
            sample |= document_ids(starts)
        return sample


class SyntheticPairs(SyntheticTokens):
    """Samples of two answers, each half a sample long."""

    def __init__(self, data: DataSection, vocab_size: int, seed: int, ends: bool = False) -> None:
        """`ends` is that of PairSamples."""
        super().__init__(data, vocab_size, seed)
        self.ends = ends

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        sample = super().samples(indices)
        starts, middle = np.zeros(sample["tokens"].shape, np.bool_), self.seq_len // 2
        starts[:, middle] = True
        labels = sample["labels"].copy()
        labels[:, [0, middle - 1]] = IGNORE_INDEX  # a prompt of one token, and the last token of the first answer
        keys = np.stack((indices + 1, indices + 1), 1).astype(np.int32)
        sample = {**sample, "labels": labels, **document_ids(starts), "pair_keys": keys}
        is_end = np.roll(starts, -1, 1)
        is_end[:, -1] = True
        return sample | at_ends(is_end, np.zeros((len(keys), 1), np.float32)) if self.ends else sample


class SyntheticAnswers(SyntheticTokens):
    """Samples of one answer after a prompt of one token. The answer to another prompt is that of the next sample."""

    def __init__(self, data: DataSection, vocab_size: int, seed: int, mismatches: bool) -> None:
        """`mismatches` is that of AnswerSamples."""
        super().__init__(data, vocab_size, seed)
        self.mismatches = mismatches

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        starts = np.zeros((len(indices), self.seq_len), np.bool_)
        own, other = super().samples(indices), super().samples(indices + 1)
        prompt = own["tokens"][:, :1]
        mismatch = np.concatenate((prompt, other["tokens"][:, 1:]), 1)
        mismatch_fields = answer_fields(mismatch, other["labels"], starts, 1) if self.mismatches else {}
        return {
            **answer_fields(own["tokens"], own["labels"], starts, 0),
            **{f"kl_{name}": field for name, field in mismatch_fields.items()},
            "pair_keys": np.stack((indices + 1, indices + 1), 1).astype(np.int32),
            "answer_labels": (indices % 2)[:, None].astype(np.int32),
        }


class SyntheticSentencePairs:
    """Masked sentence pairs in BERT's format: [CLS] a [SEP] b [SEP] and padding. Of the chosen positions, 80% are
    masked, 10% random and 10% unchanged. In a true pair, b continues where a ends."""

    def __init__(self, data: DataSection, vocab_size: int, seed: int) -> None:
        if vocab_size < 2 * FIRST_WORD_ID:
            raise UserError(f"model.vocab={vocab_size}: too small for masked samples; nearest: {2 * FIRST_WORD_ID}")
        self.num_words, self.seed = vocab_size - FIRST_WORD_ID, seed
        self.seq_len, self.max_predictions = data.seq_len, data.max_predictions

    def __len__(self) -> int:
        return 1 << 24

    def source(self, index: int) -> str:
        return f"synthetic pair {index}"

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        """Names end with their shape: B samples, T tokens, P predictions."""
        draw = self._random_columns(indices)
        max_words, max_predictions = self.seq_len - 3, self.max_predictions
        min_words = max(max_words // 2, min(2, max_words))
        words_B1 = min_words + draw(1) % (max_words + 1 - min_words)
        cut_B1 = words_B1 // 2
        first_B1 = draw(1) % self.num_words
        unrelated_B1 = draw(1) % 2
        jump_B1 = 1 + draw(1) % (self.num_words - 1)
        position_T = np.arange(self.seq_len)
        second_BT = position_T > cut_B1 + 1
        offset_BT = position_T - 1 - second_BT  # a text is a run of consecutive word ids
        text_BT = FIRST_WORD_ID + (first_B1 + offset_BT + second_BT * unrelated_B1 * jump_B1) % self.num_words
        separator_BT = (position_T == cut_B1 + 1) | (position_T == words_B1 + 2)
        used_BT = position_T <= words_B1 + 2
        tokens_BT = np.where(separator_BT, SEP, text_BT) * used_BT
        tokens_BT[:, 0] = CLS
        word_BT = used_BT & ~separator_BT & (position_T > 0)
        # Choose the words with the lowest random numbers.
        order_BT = np.where(word_BT, draw(self.seq_len), np.iinfo(np.int64).max).argsort(1)
        limit_B1 = np.minimum(max_predictions, words_B1)
        count_B1 = np.minimum(np.maximum(np.rint(0.15 * words_B1).astype(np.int64), 1), limit_B1)
        counted_BP = np.arange(max_predictions) < count_B1
        missing = max(max_predictions - self.seq_len, 0)
        positions_BP = np.pad(order_BT[:, :max_predictions], ((0, 0), (0, missing)))
        positions_BP = np.sort(np.where(counted_BP, positions_BP, self.seq_len), 1)  # unused entries sort to the end
        positions_BP = np.where(counted_BP, positions_BP, 0)
        labels_BP = np.take_along_axis(tokens_BT, positions_BP, 1)
        action_BP, random_BP = draw(max_predictions) % 10, FIRST_WORD_ID + draw(max_predictions) % self.num_words
        new_BP = np.where(action_BP < 8, MASK, np.where(action_BP == 9, random_BP, labels_BP))
        rows, columns = np.nonzero(counted_BP)
        tokens_BT[rows, positions_BP[rows, columns]] = new_BP[rows, columns]
        sample = {
            "tokens": tokens_BT,
            "segment_ids": second_BT & used_BT,
            "attention_mask": used_BT,
            "masked_positions": positions_BP,
            "labels": np.where(counted_BP, labels_BP, IGNORE_INDEX),
            "next_sentence_labels": unrelated_B1[:, 0],
        }
        return {name: array.astype(np.int32) for name, array in sample.items()}

    def _random_columns(self, indices: NDArray[np.int64]) -> Callable[[int], NDArray[np.int64]]:
        """A function that returns [samples, columns] integers from 0 to 2^31, new ones at each call."""
        key = torch.tensor(key32(self.seed, "pairs"), dtype=torch.int32)
        rows = torch.from_numpy(indices.astype(np.int32))
        a, b = row_seeds(key, rows, torch.zeros_like(rows))
        site = torch.zeros((), dtype=torch.int32)
        columns_used = 0

        def draw(columns: int) -> NDArray[np.int64]:
            nonlocal columns_used
            column = torch.arange(columns_used, columns_used + columns, dtype=torch.int32)
            columns_used += columns
            bits = element_bits((a[:, None], b[:, None]), site, column) & 0x7FFFFFFF
            values: NDArray[np.int64] = bits.numpy().astype(np.int64)
            return values

        return draw
