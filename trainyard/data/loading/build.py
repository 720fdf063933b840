"""From a configuration to its training and validation datasets."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from trainyard.config.data_schema import DataSection
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.user_code import is_user_path
from trainyard.data.formats import documents
from trainyard.data.formats.documents import InputSlice
from trainyard.data.formats.megatron_bin import MegatronTokens
from trainyard.data.loading.blend import BlendedDataset
from trainyard.data.loading.data_files import match_files, remote_files, token_prefixes
from trainyard.data.loading.dataset import CombinedDataset, Dataset, concatenate, subset
from trainyard.data.loading.demo_corpus import make_stories
from trainyard.data.loading.megatron_order import (
    MAX_DATASETS,
    MegatronOrderDataset,
    blend_indices,
    blend_sizes,
    split_documents,
)
from trainyard.data.loading.synthetic import SyntheticSentencePairs, SyntheticTokens
from trainyard.data.loading.token_samples import ContiguousTokens, TokenSamples, token_stream
from trainyard.data.loading.user_dataset import build_user_datasets
from trainyard.data.text.tokenizer import Tokenizer, TokenizerSpec, document_end_id, load_tokenizer
from trainyard.families import family_of
from trainyard.remote.chunks.remote_path import DataPath, RemoteFiles

logger = logging.getLogger(__name__)

DEMO_DOCUMENTS = 1500


class TrainValidDatasets(NamedTuple):
    train: Dataset
    validation: Dataset | None
    needs_shuffle: bool
    """True if the loader has to shuffle the training samples; blends and Megatron's order are shuffled already."""


def build_datasets(config: Config) -> TrainValidDatasets:
    data = config.data
    remote = remote_files(data, refresh=True)
    if data.source == "tokens" and data.order != "shuffled":
        return _build_in_megatron_order(config, remote)
    trains: list[Dataset] = []
    validations: list[Dataset] = []
    for paths in [(path,) for path in data.paths] if data.weights else [data.paths]:
        train, validation = _build_dataset(config, paths, remote)
        count = max(round(len(train) * data.validation_fraction), 1) if data.validation_fraction else 0
        if len(train) <= count:
            source = data.source if is_user_path(data.source) else ", ".join(paths) or "the built-in text"
            raise UserError(
                f"data.seq_len={data.seq_len}: {source} has no sample to train on; use more text or a shorter seq_len"
            )
        if count:
            train, validation = subset(train, 0, len(train) - count), subset(train, len(train) - count, count)
        trains.append(train)
        validations += [validation] if validation else []
    validation = concatenate(validations) if validations else None
    if data.weights:
        return TrainValidDatasets(BlendedDataset(trains, data.weights, config.train.seed), validation, False)
    return TrainValidDatasets(trains[0], validation, True)


def validation_sections(config: Config) -> dict[str, DataSection]:
    """How each of evaluate.sets is read: as data.paths, but in order and as a whole."""
    as_a_whole = {"weights": (), "order": "shuffled", "split": None, "validation_fraction": 0.0}
    return {
        name: config.data.model_copy(update={**as_a_whole, "paths": paths})
        for name, paths in config.evaluate.sets.items()
    }


def build_validation_sets(config: Config) -> dict[str, Dataset]:
    """The dataset of each of evaluate.sets."""
    datasets: dict[str, Dataset] = {}
    for name, data in validation_sections(config).items():
        section = config.model_copy(update={"data": data})
        try:
            datasets[name], _ = _build_dataset(section, data.paths, remote_files(data, refresh=True))
        except UserError as error:
            raise UserError(f"evaluate.sets.{name}: {str(error).removeprefix('data.paths=')}") from None
        if not len(datasets[name]):
            raise UserError(f"evaluate.sets.{name}: shorter than a sample of data.seq_len={data.seq_len} tokens")
    return datasets


def _build_dataset(
    config: Config, paths: tuple[str, ...], remote: RemoteFiles | None
) -> tuple[Dataset, Dataset | None]:
    """The dataset of these paths, and the part that data.split, or the user's function, holds out for validation."""
    data, model = config.data, config.model
    if is_user_path(data.source):
        return build_user_datasets(config, paths)
    if data.source == "synthetic":
        return (SyntheticTokens(config) if family_of(model).is_causal else SyntheticSentencePairs(config)), None
    if data.source == "hdf5":
        from trainyard.data.formats.bert_hdf5_remote import open_bert_hdf5

        pairs = open_bert_hdf5(match_files(paths, remote=remote), data.seq_len, data.max_predictions, model.vocab)
        if pairs.vocab_size > model.vocab:
            raise UserError(
                f"{', '.join(paths)}: contains token {pairs.vocab_size - 1}, but model.vocab={model.vocab}; the "
                "samples were made with another vocabulary, or model.vocab is too small"
            )
        return pairs, None
    if data.source == "arrow":
        from trainyard.data.formats.arrow_dataset import ArrowDataset

        directories = match_files(paths, directories=True, remote=remote)
        return ArrowDataset(directories, data.seq_len, data.document_mask, model.vocab), None
    if data.source == "text":
        stream = read_text(config, paths, remote)
        return TokenSamples(stream, data.seq_len, model.vocab, data.document_mask, data.mask_eod_loss), None
    trains: list[Dataset] = []
    validations: list[Dataset] = []
    for prefix in token_prefixes(paths, remote):
        token_files = MegatronTokens(prefix)
        train, validation = range(len(token_files)), range(0)
        if data.split:
            train, validation, _ = split_documents(data.split, len(token_files), data.order)
        trains += _token_samples(config, token_files, train)
        validations += _token_samples(config, token_files, validation)
    return concatenate(trains), concatenate(validations) if validations else None


def _token_samples(config: Config, token_files: MegatronTokens, sequences: range) -> list[Dataset]:
    """A dataset of these sequences; an empty list if they are too short for one sample."""
    data, stream = config.data, token_stream(token_files, sequences)
    samples = TokenSamples(stream, data.seq_len, config.model.vocab, data.document_mask, data.mask_eod_loss)
    return [samples] if len(samples) else []


def _build_in_megatron_order(config: Config, remote: RemoteFiles | None) -> TrainValidDatasets:
    """The samples that Megatron trains on for this number of steps and train.seed."""
    data, train = config.data, config.train
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
        sampling = data.seq_len, train.seed, config.model.vocab, data.document_mask, data.mask_eod_loss
        trains.append(MegatronOrderDataset(token_files, documents[0], num_samples, *sampling))
        validations += _token_samples(config, token_files, documents[1])
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
    return TrainValidDatasets(dataset, concatenate(validations) if validations else None, False)


def read_text(config: Config, paths: tuple[str, ...], remote: RemoteFiles | None = None) -> ContiguousTokens:
    """Tokenize every document into memory, with the end token after each."""
    data = config.data
    tokenizer = load_tokenizer(tokenizer_spec(config))
    check_vocab_size(tokenizer, config.model.vocab)
    if not paths:
        if data.tokenizer != "bytes":
            raise UserError("data.paths: missing; set it to text files (or data.tokenizer=bytes for the built-in text)")
        return encode_documents([make_stories(DEMO_DOCUMENTS)], tokenizer, "the built-in text")
    files = match_files(paths, directories=True, remote=remote)
    return encode_documents(text_blocks(files), tokenizer, ", ".join(paths))


def check_vocab_size(tokenizer: Tokenizer, model_vocab: int) -> None:
    if tokenizer.vocab_size > model_vocab:
        raise UserError(
            f"model.vocab={model_vocab}: the tokenizer has {tokenizer.vocab_size} tokens; "
            f"nearest: {tokenizer.vocab_size}"
        )


def text_blocks(paths: Sequence[DataPath], text_key: str = "text") -> Iterator[list[str]]:
    """The documents of text files, some at a time. `text_key` is the JSON key or column that holds the text."""
    for path in paths:
        logger.info("reading %s", path)
        for input_slice in _text_slices(path):
            texts, unreadable = documents.read_documents(input_slice, [text_key])
            if unreadable:
                raise UserError(str(unreadable[0]))
            yield [text for (text,) in texts]


def encode_documents(blocks: Iterable[list[str]], tokenizer: Tokenizer, name: str) -> ContiguousTokens:
    """The tokens of all documents in memory, with the end token after each. `name` is for error messages."""
    token_arrays = [np.zeros(0, np.int32)]
    length_arrays = [np.zeros(0, np.int64)]
    end_id = document_end_id(tokenizer)
    for texts in blocks:
        tokens, lengths = tokenizer.encode(texts)
        token_arrays.append(np.insert(tokens, np.cumsum(lengths), end_id))
        length_arrays.append(lengths + 1)
    lengths = np.concatenate(length_arrays)
    return ContiguousTokens(name, np.concatenate(token_arrays), np.cumsum(lengths) - lengths)


def _text_slices(path: DataPath) -> Iterable[InputSlice]:
    """Slices of a file; a file of an unknown kind is one document."""
    known = path.is_dir() or path.suffix in documents.KIND_BY_SUFFIX.keys() | documents.COMPRESSION_BY_SUFFIX.keys()
    return documents.input_slices([path]) if known else [InputSlice(path, "text", 0, 0)]


def tokenizer_spec(config: Config) -> TokenizerSpec:
    data = config.data
    return TokenizerSpec(data.tokenizer, data.vocab_file, data.merges_file, data.end_of_text)
