"""Megatron's sample order, from the same stream of random numbers, for runs that must see the same samples.

Documents are repeated for as many epochs as the run needs and shuffled together (except the last epoch if only a
small part of it is needed), samples are cut from the result, and the sample indices are shuffled too. There are no
index files: the start of a sample follows from the lengths of the documents before it.
"""

import numpy as np
from numpy.typing import NDArray

from trainyard.core.errors import UserError
from trainyard.data.formats.megatron_bin import MegatronTokens
from trainyard.data.loading.dataset import CombinedDataset
from trainyard.data.loading.token_samples import ReorderedTokens, TokenSamples

SEPARATE_LAST_EPOCH_BELOW = 0.80
"""Fraction of an epoch. If the last epoch contributes less, its samples come after all others."""


class MegatronOrderDataset(CombinedDataset):
    """A dataset of exactly `num_samples` samples in training order."""

    def __init__(
        self,
        token_files: MegatronTokens,
        documents: range,
        num_samples: int,
        seq_len: int,
        seed: int,
        vocab_size: int,
        document_mask: bool = False,
        mask_eod_loss: bool = False,
    ) -> None:
        lengths = token_files.sequence_lengths[documents.start : documents.stop]
        tokens_per_epoch = int(lengths.sum(dtype=np.int64))
        if tokens_per_epoch < 2:
            raise UserError(
                f"{token_files.prefix}: {tokens_per_epoch} tokens in {len(documents)} documents; too few for a sample"
            )
        epochs = max(-(-(num_samples * seq_len + 1) // tokens_per_epoch), 1)
        samples_before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_len
        samples_per_epoch = (tokens_per_epoch - 1) // seq_len
        separate_last = epochs > 1 and (
            num_samples - samples_before_last < int(SEPARATE_LAST_EPOCH_BELOW * samples_per_epoch)
        )
        rng = np.random.RandomState(seed)
        document_indices = np.arange(documents.start, documents.stop, dtype=np.int32)
        repeats = (epochs - 1, 1) if separate_last else (epochs,)
        order = np.concatenate([_shuffle(np.tile(document_indices, count), rng) for count in repeats])
        samples = TokenSamples(ReorderedTokens(token_files, order), seq_len, vocab_size, document_mask, mask_eod_loss)
        # Megatron shuffles all samples that can be cut, used or not; those of a separate last epoch on their own.
        total = (epochs * tokens_per_epoch - 1) // seq_len
        split = samples_before_last if separate_last else total
        dtype = np.uint32 if total < 2**32 - 2 else np.int64
        ranges = [np.arange(split, dtype=dtype), np.arange(split, total, dtype=dtype)]
        sample_order = np.concatenate([_shuffle(indices, rng) for indices in ranges if len(indices)])
        super().__init__([samples], num_samples, lambda i: (np.zeros_like(i), sample_order[i].astype(np.int64)))


def _shuffle(values: NDArray[np.generic], rng: np.random.RandomState) -> NDArray[np.generic]:
    rng.shuffle(values)
    return values


def split_documents(split: str, documents: int) -> tuple[range, range, range]:
    """Documents for training, validation and test by weights such as 980,10,10."""
    try:
        weights = [float(weight) for weight in split.replace("/", ",").split(",")][:3]
    except ValueError:
        weights = []
    if not weights or min(weights) < 0 or sum(weights) <= 0:
        raise UserError(f"data.split={split}: not weights for training, validation and test; nearest: 980,10,10")
    weights += [0.0] * (3 - len(weights))
    ends = [0]
    for weight in weights:
        ends.append(ends[-1] + round(weight / sum(weights) * documents))
    excess = ends[-1] - documents  # rounding may give a few too many or too few
    ends = [0, *(end - excess for end in ends[1:])]
    return range(ends[0], ends[1]), range(ends[1], ends[2]), range(ends[2], ends[3])


def blend_indices(weights: list[float], num_samples: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """For each sample, its dataset and its index there. The dataset furthest below its weight comes next."""
    dataset_indices, sample_indices = np.empty(num_samples, np.uint8), np.empty(num_samples, np.int64)
    taken = [0] * len(weights)
    for position in range(num_samples):
        deficits = [weight * max(position, 1) - count for weight, count in zip(weights, taken, strict=True)]
        chosen = deficits.index(max(deficits))
        dataset_indices[position], sample_indices[position] = chosen, taken[chosen]
        taken[chosen] += 1
    return dataset_indices, sample_indices
