"""Documents with trained and untrained tokens, as conversations have them."""

import numpy as np
from numpy.typing import NDArray

from trainyard.config.schema import Config
from trainyard.data.loading.dataset import Dataset
from trainyard.data.loading.packing import document_samples

PAD_TOKEN = 3


class Conversations:
    """Random documents of given lengths: runs of about three untrained and three trained tokens."""

    def __init__(self, lengths: list[int], vocab: int) -> None:
        self.lengths: NDArray[np.int32] = np.array(lengths, np.int32)
        self.vocab = vocab

    def document(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        length, rng = int(self.lengths[index]), np.random.default_rng(index)
        tokens = rng.integers(0, self.vocab, length, dtype=np.int32)
        return tokens, (np.arange(length) + rng.integers(6)) % 6 >= 3


LENGTHS = [32, 5, 9, 17, 2, 11, 21, 7, 4, 3, 6, 10, 1, 12, 8, 14, 13, 28, 16, 15]
"""20 documents, which fill 8 packs of 32 tokens, some with padding."""


def make_conversations(config: Config) -> Dataset:
    """What data.source names: the documents, packed or padded as the configuration says."""
    return document_samples(Conversations(LENGTHS, config.model.vocab), config.data, PAD_TOKEN)
