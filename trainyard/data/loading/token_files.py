"""Datasets of Megatron's token files."""

from collections.abc import Sequence

import numpy as np

from trainyard.config.data_schema import DataSection
from trainyard.config.schema import TrainSection
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.data.formats.megatron_bin import MegatronTokens
from trainyard.data.formats.remote_tokens import RemoteTokens
from trainyard.data.loading.data_files import token_prefixes
from trainyard.data.loading.dataset import CombinedDataset, Dataset, concatenate
from trainyard.data.loading.megatron_order import (
    MAX_DATASETS,
    MegatronOrderDataset,
    blend_indices,
    blend_sizes,
    split_documents,
)
from trainyard.data.loading.token_samples import TokenSamples, token_stream
from trainyard.remote.chunks.remote_path import RemoteFiles

TOKENS_PER_READ = 1 << 26
UINT16_VOCAB = 1 << 16


def open_token_files(
    data: DataSection, vocab_size: int, paths: Sequence[str], remote: RemoteFiles | None
) -> tuple[Dataset, Dataset | None]:
    """The samples of these files, and those of the documents that data.split holds out."""
    trains: list[Dataset] = []
    validations: list[Dataset] = []
    for prefix in token_prefixes(paths, remote):
        token_files = MegatronTokens(prefix)
        train, validation = range(len(token_files)), range(0)
        if data.split:
            train, validation, _ = split_documents(data.split, len(token_files), data.order)
        trains += _token_samples(data, vocab_size, token_files, train)
        validations += _token_samples(data, vocab_size, token_files, validation)
    return concatenate(trains), concatenate(validations) if validations else None


def _token_samples(data: DataSection, vocab_size: int, token_files: MegatronTokens, sequences: range) -> list[Dataset]:
    """A dataset of these sequences; an empty list if they are too short for one sample."""
    stream = token_stream(token_files, sequences)
    samples = TokenSamples(stream, data.seq_len, vocab_size, data.document_mask, data.mask_eod_loss)
    return [samples] if len(samples) else []


def open_in_megatron_order(
    data: DataSection, vocab_size: int, train: TrainSection, remote: RemoteFiles | None
) -> tuple[Dataset, Dataset | None]:
    """The samples that Megatron trains on for this number of steps and train.seed."""
    prefixes = token_prefixes(data.paths, remote)
    if len(prefixes) != (len(data.weights) or 1):
        raise UserError(
            f"data.paths: {counted(len(prefixes), 'dataset')}; data.order={data.order} needs "
            "exactly one, or data.weights for each"
        )
    if len(prefixes) > (limit := MAX_DATASETS[data.order]):
        raise UserError(
            f"data.paths: {counted(len(prefixes), 'dataset')}; Megatron blends at most {limit} "
            f"with data.order={data.order}"
        )
    total = train.steps * train.global_batch
    sizes = blend_sizes(data.weights, total, data.order) if data.weights else [total]
    trains: list[MegatronOrderDataset] = []
    validations: list[Dataset] = []
    for prefix, num_samples in zip(prefixes, sizes, strict=True):
        token_files = MegatronTokens(prefix)
        documents = split_documents(data.split or "1,0,0", len(token_files), data.order)
        sampling = data.seq_len, train.seed, vocab_size, data.document_mask, data.mask_eod_loss
        trains.append(MegatronOrderDataset(token_files, documents[0], num_samples, *sampling))
        validations += _token_samples(data, vocab_size, token_files, documents[1])
    dataset: Dataset = trains[0]
    if data.weights:
        dataset_indices, sample_indices = blend_indices(data.weights, total, data.order)
        for number, count in enumerate(np.bincount(dataset_indices).tolist()):
            if count > (available := trains[number].num_available):
                raise UserError(
                    f"data.weights: the blend needs {counted(count, 'sample')} of "
                    f"{prefixes[number]}, Megatron has {available}"
                )
        dataset = CombinedDataset(trains, total, lambda i: (dataset_indices[i].astype(np.int64), sample_indices[i]))
    return dataset, concatenate(validations) if validations else None


def largest_token(paths: Sequence[str], remote: RemoteFiles | None) -> int:
    """The largest token id. All are read, except 16-bit tokens behind URLs: for these, the largest that may occur."""
    largest = 1
    for prefix in token_prefixes(paths, remote):
        tokens = MegatronTokens(prefix).tokens
        if isinstance(tokens, RemoteTokens) and tokens.dtype.itemsize == 2:
            largest = max(largest, UINT16_VOCAB - 1)
            continue
        for start in range(0, len(tokens), TOKENS_PER_READ):
            largest = max(largest, int(np.max(tokens[start : start + TOKENS_PER_READ])))
    return largest
