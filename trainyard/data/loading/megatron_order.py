"""The reference's order of samples, from the same stream of random numbers: for runs that must see what it saw.

Documents are repeated for as many epochs as the run needs and shuffled all at once (the last epoch apart, where little
of it is needed), samples are cut from that row, and their numbers are shuffled too. No index files: where a sample
begins follows from the lengths of the documents before it.
"""

import numpy as np
from numpy.typing import NDArray

from trainyard.core.errors import UserError
from trainyard.data.formats.megatron_bin import MegatronTokens
from trainyard.data.loading.token_samples import ReorderedTokens, TokenSamples

SEPARATE_LAST_EPOCH_BELOW = 0.80
"""Of an epoch: where the last one gives less, its samples come after all others."""


class MegatronOrderDataset:
    """A Source of exactly `samples` samples, numbered as they are trained on."""

    def __init__(
        self,
        data: MegatronTokens,
        documents: range,
        num_samples: int,
        seq_len: int,
        seed: int,
        vocab_size: int,
        document_mask: bool = False,
        mask_eod_loss: bool = False,
    ) -> None:
        per_epoch = int(data.sequence_lengths[documents.start : documents.stop].sum(dtype=np.int64))
        if per_epoch < 2:
            raise UserError(f"{data.prefix}: {per_epoch} tokens in {len(documents)} documents; too few for a sample")
        epochs = _num_epochs(per_epoch, num_samples, seq_len)
        before = ((epochs - 1) * per_epoch - 1) // seq_len
        apart = epochs > 1 and num_samples - before < int(SEPARATE_LAST_EPOCH_BELOW * ((per_epoch - 1) // seq_len))
        stream = np.random.RandomState(seed)
        numbers = np.arange(documents.start, documents.stop, dtype=np.int32)
        if apart:
            order = np.concatenate([_shuffle(np.tile(numbers, each), stream) for each in (epochs - 1, 1)])
        else:
            order = _shuffle(np.tile(numbers, epochs), stream)
        self.token_samples = TokenSamples(
            ReorderedTokens(data, order), seq_len, vocab_size, document_mask, mask_eod_loss
        )
        total = (epochs * per_epoch - 1) // seq_len
        # The reference shuffles all that were cut, used or not; the first part alone where the last epoch is apart.
        first = before if apart else total
        kind = np.uint32 if total < 2**32 - 2 else np.int64
        parts = [np.arange(first, dtype=kind), np.arange(first, total, dtype=kind)]
        self.sample_order = np.concatenate([_shuffle(part, stream) for part in parts if len(part)])
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def samples(self, indices: NDArray[np.int64]) -> dict[str, NDArray[np.int32]]:
        return self.token_samples.samples(self.sample_order[indices].astype(np.int64))


def _num_epochs(tokens: int, samples: int, sequence: int) -> int:
    """The fewest with enough samples."""
    return max(-(-(samples * sequence + 1) // tokens), 1)


def _shuffle(numbers: NDArray[np.generic], stream: np.random.RandomState) -> NDArray[np.generic]:
    stream.shuffle(numbers)
    return numbers


def split_documents(words: str, documents: int) -> tuple[range, range, range]:
    """Documents for training, validation and test by shares such as 980,10,10."""
    try:
        shares = [float(word) for word in words.replace("/", ",").split(",")][:3]
    except ValueError:
        shares = []
    if not shares or min(shares) < 0 or sum(shares) <= 0:
        raise UserError(f"data.split={words}: not shares of training, validation and test; nearest: 980,10,10")
    shares += [0.0] * (3 - len(shares))
    ends = [0]
    for share in shares:
        ends.append(ends[-1] + round(share / sum(shares) * documents))
    beyond = ends[-1] - documents
    ends = [ends[0], *(end - beyond for end in ends[1:])]
    return range(ends[0], ends[1]), range(ends[1], ends[2]), range(ends[2], ends[3])


def blend_indices(weights: list[float], samples: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """For each sample: which set it is of, and which of that set's. The set furthest behind its share is next."""
    sets, numbers = np.empty(samples, np.uint8), np.empty(samples, np.int64)
    taken = [0] * len(weights)
    each = range(len(weights))
    for place in range(samples):
        so_far = max(place, 1)
        behind = [weights[number] * so_far - taken[number] for number in each]
        chosen = behind.index(max(behind))
        sets[place], numbers[place] = chosen, taken[chosen]
        taken[chosen] += 1
    return sets, numbers
