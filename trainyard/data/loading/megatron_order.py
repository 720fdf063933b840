"""Megatron's sample order, from the same stream of random numbers, for runs that must see the same samples.

Documents are repeated for as many epochs as the run needs and shuffled together (except the last epoch if only a
small part of it is needed), samples are cut from the result, and the sample indices are shuffled too. There are no
index files: the start of a sample follows from the lengths of the documents before it.

Two versions differ in how they round: `megatron` is megatron-core (0.12 and later), `megatron-2023` is Megatron-LM
until 2023, which AWS's reference for Trainium and NeMo 1 contain. They give training other documents (data.split) and
prepare another number of samples of a blended dataset.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import ceil, isfinite

import numpy as np
from numpy.typing import NDArray

from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.data.formats.megatron_bin import MegatronTokens
from trainyard.data.loading.dataset import CombinedDataset
from trainyard.data.loading.token_samples import ReorderedTokens, TokenSamples

SEPARATE_LAST_EPOCH_BELOW = 0.80
"""Fraction of an epoch. If the last epoch contributes less, its samples come after all others."""
BLEND_MARGIN = 1.005
"""Megatron prepares this many times the samples of each blended dataset, in case rounding takes some."""
MAX_DATASETS = {"megatron": 32766, "megatron-2023": 254}
"""Blended datasets that Megatron accepts."""
PYTHON_LOOP_DATASETS = 16
"""Up to this many datasets, a Python loop over them is faster than numpy."""


class MegatronOrderDataset(CombinedDataset):
    """A dataset of exactly `num_samples` samples in training order."""

    num_available: int
    """Samples that can be cut from the repeated documents, at least `num_samples`."""

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
                f"{token_files.prefix}: {counted(tokens_per_epoch, 'token')} in "
                f"{counted(len(documents), 'document')}; too few for a sample"
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
        self.num_available = total
        super().__init__([samples], num_samples, lambda i: (np.zeros_like(i), sample_order[i].astype(np.int64)))


def _shuffle(values: NDArray[np.generic], rng: np.random.RandomState) -> NDArray[np.generic]:
    rng.shuffle(values)
    return values


def split_documents(split: str, documents: int, order: str) -> tuple[range, range, range]:
    """Documents for training, validation and test by weights such as 980,10,10."""
    try:
        weights = [float(weight) for weight in split.replace("/", ",").split(",")]
    except ValueError:
        weights = []
    valid = all(isfinite(weight) and weight >= 0 for weight in weights)
    if not valid or not any(weights) or len(weights) > 3:
        raise UserError(f"data.split={split}: not weights for training, validation and test; nearest: 980,10,10")
    shares = _normalize(weights + [0.0] * (3 - len(weights)))
    if order == "megatron":
        ends = [round(share * documents) for share in accumulate(shares)]
    else:
        ends = list(accumulate(round(share * documents) for share in shares))
        excess = ends[-1] - documents  # rounding may give a few too many or too few
        ends = [max(end - excess, 0) for end in ends]
    return range(ends[0]), range(ends[0], ends[1]), range(ends[1], ends[2])


def blend_sizes(weights: tuple[float, ...], num_samples: int, order: str) -> list[int]:
    """How many samples of each dataset Megatron prepares for a blend of `num_samples`."""
    shares = _blend_shares(weights, order)
    if order == "megatron":
        return [ceil(ceil(num_samples * share) * BLEND_MARGIN) for share in shares]
    return [ceil(num_samples * share * BLEND_MARGIN) for share in shares]


def blend_indices(
    weights: tuple[float, ...], num_samples: int, order: str
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """For each sample, its dataset and its index there. The dataset furthest below its weight comes next.

    Megatron normalizes the weights twice. The second time changes last bits, and these decide between equal datasets.
    So does rounding: the product is rounded before the difference, as Megatron's helper does on x86-64. On Arm, where
    its compiler fuses them, Megatron has another order; here the order is the same on every host.
    """
    normalized = _normalize(_blend_shares(weights, order))
    as_array, counts = np.array(normalized), np.zeros(len(weights))
    taken = [0] * len(weights)
    dataset_indices, sample_indices = np.empty(num_samples, np.int16), np.empty(num_samples, np.int64)
    for position in range(num_samples):
        target = max(position, 1)
        if len(weights) <= PYTHON_LOOP_DATASETS:
            deficits = [weight * target - count for weight, count in zip(normalized, taken, strict=True)]
            chosen = deficits.index(max(deficits))
        else:
            chosen = int((as_array * target - counts).argmax())
            counts[chosen] += 1
        dataset_indices[position], sample_indices[position] = chosen, taken[chosen]
        taken[chosen] += 1
    return dataset_indices, sample_indices


def _blend_shares(weights: tuple[float, ...], order: str) -> list[float]:
    if order == "megatron":
        return _normalize(weights)
    total = list(accumulate(weights))[-1]  # from left to right, as sum() does not since Python 3.12
    return [weight / total for weight in weights]


def _normalize(weights: Sequence[float]) -> list[float]:
    """Shares by numpy's sum, which adds more than eight weights in pairs."""
    array = np.array(weights, np.float64)
    return (array / np.sum(array)).tolist()
