"""Answers one by one instead of in pairs, each with its label, and with the answer to another prompt in its place."""

import numpy as np
from numpy.typing import NDArray

from trainyard.data.loading.conversation_samples import ConversationSamples
from trainyard.data.loading.dataset import Indices
from trainyard.data.loading.packing import PackedSamples, content_key
from trainyard.data.samples import Sample, document_ids


class Answers:
    """The answers of records with their prompts, as documents: one of a record with a label, and both of a pair, the
    chosen one as good.

    A mismatch is the prompt of an answer with that of the record before it in the data set, in a pair the chosen with
    the chosen and the rejected with the rejected. It therefore depends on no batch and no rank.
    """

    def __init__(self, records: ConversationSamples, longest: int) -> None:
        """`longest`: tokens of a document; mismatches are cut."""
        self.records, self.longest = records, longest
        splits, of_pair = records.splits, records.splits > 0
        self.record: Indices = np.repeat(np.arange(len(splits)), 1 + of_pair)
        """The record of each answer."""
        first = np.searchsorted(self.record, np.arange(len(splits)))
        self.is_second: NDArray[np.bool_] = np.arange(len(self.record)) > first[self.record]
        """It is the rejected one of a pair."""
        self.is_good = np.where(of_pair, 1, records.values)[self.record].astype(np.bool_) & ~self.is_second
        before = (self.record - 1) % len(splits)
        self.other: Indices = first[before] + (self.is_second & of_pair[before])
        """The answer of each mismatch."""
        ends = np.where(of_pair, splits, records.lengths)
        own = np.where(self.is_second, (records.lengths - splits)[self.record], ends[self.record])
        prompts = np.array([int(self.document(index)[1].argmax()) for index in range(len(own))], np.int64)
        self.prompts: NDArray[np.int64] = prompts
        """Tokens of each prompt."""
        other = np.minimum(prompts + (own - prompts)[self.other], longest)
        self.lengths: NDArray[np.int32] = np.maximum(own, other).astype(np.int32)
        """Tokens of the longer one of each answer and its mismatch."""

    def document(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        record = int(self.record[index])
        split = self.records.split(record)
        part = slice(split, None) if self.is_second[index] else slice(0, split or None)
        tokens, trained = self.records.document(record)
        return tokens[part], trained[part]

    def mismatch(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The document with the answer to another prompt."""
        other = int(self.other[index])
        own, others = self.document(index), self.document(other)
        mine, theirs = slice(0, self.prompts[index]), slice(self.prompts[other], None)
        tokens = np.concatenate((own[0][mine], others[0][theirs]))[: self.longest]
        return tokens, np.concatenate((own[1][mine], others[1][theirs]))[: self.longest]

    def source(self, index: int) -> str:
        return self.records.source(int(self.record[index]))


class AnswerSamples(PackedSamples):
    """Samples of answers, one per sample or as many as fit, perhaps with their mismatches as fields of their own."""

    def __init__(self, answers: Answers, seq_len: int, pad_token: int, packing: bool, mismatches: bool) -> None:
        super().__init__(answers, seq_len, pad_token)
        self.answers, self.mismatches = answers, mismatches
        if not packing:
            count = len(answers.lengths)
            self.order, self.bounds, self.lengths = np.arange(count), np.arange(count + 1), answers.lengths
        self.most = int(np.diff(self.bounds).max())
        """Answers that no sample exceeds."""

    def samples(self, indices: Indices) -> Sample:
        rows = [self.documents_of(index) for index in indices.tolist()]
        keys = np.zeros((len(rows), 2 * self.most), np.int32)
        labels = np.zeros((len(rows), self.most), np.int32)
        for row, answers in enumerate(rows):
            for place, index in enumerate(answers):
                content = (*self.answers.document(index), *(self.answers.mismatch(index) if self.mismatches else ()))
                keys[row, 2 * place : 2 * place + 2] = content_key(len(content[0]), *content)
                labels[row, place] = self.answers.is_good[index]
        sample = {**answer_fields(*self._place(rows), 0), "pair_keys": keys, "answer_labels": labels}
        if self.mismatches:
            others = answer_fields(*self._place(rows, self.answers.mismatch), 1)
            sample |= {f"kl_{name}": field for name, field in others.items()}
        return sample


def answer_fields(tokens: NDArray[np.int32], labels: NDArray[np.int32], starts: NDArray[np.bool_], odd: int) -> Sample:
    """The fields of documents, of which the answers of a sample are the even ones, and their mismatches the odd."""
    ids = document_ids(starts)
    return {"tokens": tokens, "labels": labels, **ids, "document_ids": 2 * ids["document_ids"] + odd}
