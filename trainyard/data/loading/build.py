"""From a configuration to its samples: the training ones, in their order, and the held-out ones."""

import glob
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.data.formats import documents
from trainyard.data.formats.documents import InputSlice, UnreadableRecord
from trainyard.data.formats.megatron_bin import MegatronTokens
from trainyard.data.loading import megatron_order
from trainyard.data.loading.blend import BlendedDataset, IndexedBlend
from trainyard.data.loading.dataset import ConcatDataset, Dataset, Subset
from trainyard.data.loading.demo_corpus import make_stories
from trainyard.data.loading.synthetic import SyntheticSentencePairs, SyntheticTokens
from trainyard.data.loading.token_samples import ContiguousTokens, ReorderedTokens, TokenSamples, TokenStream
from trainyard.data.text.tokenizer import TokenizerSpec, load_tokenizer

Say = Callable[[str], None]

DEMO_DOCUMENTS = 1500
BLEND_MARGIN = 1.005
"""The reference makes so many more of each blended set, in case rounding takes some."""


class TrainValidDatasets(NamedTuple):
    train: Dataset
    validation: Dataset | None
    needs_shuffle: bool
    """Whether the training samples are still to be shuffled."""


def build_datasets(config: Config, say: Say = lambda line: None) -> TrainValidDatasets:
    data = config.data
    if data.source == "tokens" and data.order == "megatron":
        return _build_in_megatron_order(config)
    trains, helds = [], []
    for paths in _path_groups(config):
        whole, held = _build_dataset(config, paths, say)
        count = max(round(len(whole) * data.validation_fraction), 1) if data.validation_fraction else 0
        if len(whole) <= count:
            where = ", ".join(paths) or "the text"
            raise UserError(
                f"data.seq_len={data.seq_len}: {where} gives no sample to train on; use more text or a shorter one"
            )
        if count:
            whole, held = Subset(whole, 0, len(whole) - count), Subset(whole, len(whole) - count, count)
        trains.append(whole)
        helds.append(held)
    held_out = ConcatDataset([held for held in helds if held]) if any(helds) else None
    if data.weights:
        return TrainValidDatasets(BlendedDataset(trains, data.weights, config.train.seed), held_out, False)
    return TrainValidDatasets(trains[0], held_out, True)


def _path_groups(config: Config) -> list[tuple[str, ...]]:
    """The paths of each set: all together, or one for each weight."""
    data = config.data
    return [(path,) for path in data.paths] if data.weights else [data.paths]


def _build_dataset(config: Config, paths: tuple[str, ...], say: Say) -> tuple[Dataset, Dataset | None]:
    """Samples of one set, and those that data.split holds out."""
    data, model = config.data, config.model
    if data.source == "synthetic":
        return (SyntheticSentencePairs(config) if model.family == "bert" else SyntheticTokens(config)), None
    if data.source == "hdf5":
        from trainyard.data.formats.bert_hdf5_cache import BertHdf5Dataset

        pairs = BertHdf5Dataset(_match_files(paths), data.seq_len, data.max_predictions, say)
        if pairs.vocab_size > model.vocab:
            raise UserError(
                f"{', '.join(paths)}: has the token {pairs.vocab_size - 1}, but model.vocab={model.vocab}; the samples are "
                "of another vocabulary, or model.vocab is too small"
            )
        return pairs, None
    if data.source == "arrow":
        from trainyard.data.formats.arrow_dataset import ArrowDataset

        return ArrowDataset(_match_files(paths, directories=True), data.seq_len, data.document_mask, model.vocab), None
    if data.source == "text":
        row = read_text(config, paths, say)
        return TokenSamples(row, data.seq_len, model.vocab, data.document_mask, data.mask_eod_loss), None
    trains: list[Dataset] = []
    helds: list[Dataset] = []
    for prefix in _token_prefixes(paths):
        tokens = MegatronTokens(prefix)
        train, held = range(len(tokens)), range(0)
        if data.split:
            train, held, _ = megatron_order.split_documents(data.split, len(tokens))
        for numbers, into in ((train, trains), (held, helds)):
            into += _token_samples(config, tokens, numbers)
    return ConcatDataset(trains), ConcatDataset(helds) if helds else None


def _token_samples(config: Config, tokens: MegatronTokens, numbers: range) -> list[Dataset]:
    """Samples of some sequences of a set; none where they are too short for one."""
    if not len(numbers):
        return []
    data = config.data
    rows = TokenSamples(
        _token_stream(tokens, numbers), data.seq_len, config.model.vocab, data.document_mask, data.mask_eod_loss
    )
    return [rows] if len(rows) else []


def _token_stream(data: MegatronTokens, numbers: range) -> TokenStream:
    """Sequences of a set as they follow each other."""
    if not data.contiguous:
        return ReorderedTokens(data, np.arange(numbers.start, numbers.stop, dtype=np.int32))
    first = int(data.sequence_starts[numbers.start])
    last = int(data.sequence_starts[numbers.stop - 1]) + int(data.sequence_lengths[numbers.stop - 1])
    begins = data.sequence_starts[numbers.start : numbers.stop] - first
    return ContiguousTokens(str(data.prefix), data.tokens[first:last], begins)


def _build_in_megatron_order(config: Config) -> TrainValidDatasets:
    """As the reference would for this many steps, from train.seed."""
    data, train = config.data, config.train
    prefixes = _token_prefixes(data.paths)
    weights = [weight / sum(data.weights) for weight in data.weights] if data.weights else [1.0]
    if len(prefixes) != len(weights):
        raise UserError(f"data.paths: {len(prefixes)} sets; data.order=megatron wants one, or data.weights for each")
    total = train.steps * train.global_batch
    sources: list[Dataset] = []
    helds: list[Dataset] = []
    for prefix, weight in zip(prefixes, weights, strict=True):
        tokens = MegatronTokens(prefix)
        wanted = total if len(prefixes) == 1 else ceil(ceil(total * weight) * BLEND_MARGIN)
        own, held, _ = megatron_order.split_documents(data.split or "1,0,0", len(tokens))
        sources.append(
            megatron_order.MegatronOrderDataset(
                tokens,
                own,
                wanted,
                data.seq_len,
                train.seed,
                config.model.vocab,
                data.document_mask,
                data.mask_eod_loss,
            )
        )
        helds += _token_samples(config, tokens, held)
    held_out = ConcatDataset(helds) if helds else None
    if len(sources) == 1:
        return TrainValidDatasets(sources[0], held_out, False)
    return TrainValidDatasets(IndexedBlend(sources, *megatron_order.blend_indices(weights, total)), held_out, False)


def read_text(config: Config, paths: tuple[str, ...], say: Say) -> ContiguousTokens:
    """Every document through the tokenizer, the end token after each, in memory."""
    data = config.data
    tokenizer = load_tokenizer(tokenizer_spec(config))
    if tokenizer.vocab_size > config.model.vocab:
        raise UserError(
            f"model.vocab={config.model.vocab}: the tokenizer has {tokenizer.vocab_size} tokens; nearest: {tokenizer.vocab_size}"
        )
    rows: list[NDArray[np.int32]] = []
    counts: list[NDArray[np.int64]] = []

    def add(texts: list[str]) -> None:
        tokens, sizes = tokenizer.encode(texts)
        rows.append(np.insert(tokens, np.cumsum(sizes), tokenizer.end_id))
        counts.append(sizes + 1)

    if not paths:
        if data.tokenizer != "bytes":
            raise UserError(
                "data.paths: missing; name the text files (or use data.tokenizer=bytes for the built-in text)"
            )
        add(make_stories(DEMO_DOCUMENTS))
    for path in _match_files(paths, directories=True):
        say(f"reading {path}")
        known = path.is_dir() or path.suffix in (
            *documents.JSON_LINES_SUFFIXES,
            *documents.COMPRESSION_BY_SUFFIX,
            ".parquet",
        )
        for piece in documents.input_slices([path]) if known else [InputSlice(path, "text", 0, 0, None, 0)]:
            texts = []
            for found in documents.read_documents(piece, ["text"]):
                if isinstance(found, UnreadableRecord):
                    raise UserError(f"{found.path}: {found.location}: {found.reason}")
                texts.append(found[0])
            add(texts)
    ends = np.cumsum(np.concatenate(counts))
    return ContiguousTokens(
        ", ".join(paths) or "the built-in text", np.concatenate(rows), ends - np.concatenate(counts)
    )


def tokenizer_spec(config: Config) -> TokenizerSpec:
    data = config.data
    return TokenizerSpec(data.tokenizer, data.vocab_file, data.merges_file, data.end_of_text)


def _token_prefixes(paths: Sequence[str]) -> list[Path]:
    """Of sets of tokens: a name without its suffix, or a glob that finds the .idx."""
    found: list[Path] = []
    for pattern in paths:
        name = pattern.removesuffix(".idx").removesuffix(".bin")
        matches = sorted(glob.glob(str(Path(f"{name}.idx").expanduser())))
        if not matches:
            raise UserError(f"data.paths={pattern}: no such set of tokens ({name}.bin and {name}.idx)")
        found += [Path(match).with_suffix("") for match in matches]
    if not found:
        raise UserError("data.paths: missing; name the sets of tokens (PREFIX of PREFIX.bin and PREFIX.idx)")
    return found


def _match_files(paths: Sequence[str], directories: bool = False) -> list[Path]:
    found: list[Path] = []
    for pattern in paths:
        matches = [Path(match) for match in sorted(glob.glob(str(Path(pattern).expanduser())))]
        files = [match for match in matches if match.is_file() or (directories and match.is_dir())]
        if not files:
            raise UserError(f"data.paths={pattern}: no such file; give text files, or --smoke for a trial without data")
        found += files
    return found
