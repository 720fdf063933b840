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
from trainyard.data.formats.documents import Bad, Piece
from trainyard.data.formats.megatron_bin import Indexed
from trainyard.data.loading import megatron_order
from trainyard.data.loading.blend import Blend, Listed
from trainyard.data.loading.dataset import Joined, Part, Source
from trainyard.data.loading.demo_corpus import stories
from trainyard.data.loading.synthetic import SyntheticPairs, SyntheticTokens
from trainyard.data.loading.token_samples import Chain, Flat, Row, Rows
from trainyard.data.text.tokenizer import Spec, open_tokenizer

Say = Callable[[str], None]

STORIES = 1500
MORE = 1.005
"""The reference makes so many more of each blended set, in case rounding takes some."""


class Opened(NamedTuple):
    train: Source
    held_out: Source | None
    shuffle: bool
    """Whether the training samples are still to be shuffled."""


def open_sources(config: Config, say: Say = lambda line: None) -> Opened:
    data = config.data
    if data.source == "tokens" and data.order == "megatron":
        return _as_megatron(config)
    trains, helds = [], []
    for paths in _sets(config):
        whole, held = _open(config, paths, say)
        count = max(round(len(whole) * data.validation), 1) if data.validation else 0
        if len(whole) <= count:
            where = ", ".join(paths) or "the text"
            raise UserError(
                f"data.sequence={data.sequence}: {where} gives no sample to train on; use more text or a shorter one"
            )
        if count:
            whole, held = Part(whole, 0, len(whole) - count), Part(whole, len(whole) - count, count)
        trains.append(whole)
        helds.append(held)
    held_out = Joined([held for held in helds if held]) if any(helds) else None
    if data.weights:
        return Opened(Blend(trains, data.weights, config.train.seed), held_out, False)
    return Opened(trains[0], held_out, True)


def _sets(config: Config) -> list[tuple[str, ...]]:
    """The paths of each set: all together, or one for each weight."""
    data = config.data
    return [(path,) for path in data.paths] if data.weights else [data.paths]


def _open(config: Config, paths: tuple[str, ...], say: Say) -> tuple[Source, Source | None]:
    """Samples of one set, and those that data.split holds out."""
    data, model = config.data, config.model
    if data.source == "synthetic":
        return (SyntheticPairs(config) if model.family == "bert" else SyntheticTokens(config)), None
    if data.source == "hdf5":
        from trainyard.data.formats.bert_hdf5_cache import Hdf5Pairs

        pairs = Hdf5Pairs(_files(paths), data.sequence, data.predictions, say)
        if pairs.vocab > model.vocab:
            raise UserError(
                f"{', '.join(paths)}: has the token {pairs.vocab - 1}, but model.vocab={model.vocab}; the samples are "
                "of another vocabulary, or model.vocab is too small"
            )
        return pairs, None
    if data.source == "arrow":
        from trainyard.data.formats.arrow_dataset import ArrowBlocks

        return ArrowBlocks(_files(paths, directories=True), data.sequence, data.separate, model.vocab), None
    if data.source == "text":
        row = read_text(config, paths, say)
        return Rows(row, data.sequence, model.vocab, data.separate, data.mask_ends), None
    trains: list[Source] = []
    helds: list[Source] = []
    for prefix in _prefixes(paths):
        tokens = Indexed(prefix)
        train, held = range(len(tokens)), range(0)
        if data.split:
            train, held, _ = megatron_order.split(data.split, len(tokens))
        for numbers, into in ((train, trains), (held, helds)):
            into += _rows(config, tokens, numbers)
    return Joined(trains), Joined(helds) if helds else None


def _rows(config: Config, tokens: Indexed, numbers: range) -> list[Source]:
    """Samples of some sequences of a set; none where they are too short for one."""
    if not len(numbers):
        return []
    data = config.data
    rows = Rows(_row(tokens, numbers), data.sequence, config.model.vocab, data.separate, data.mask_ends)
    return [rows] if len(rows) else []


def _row(data: Indexed, numbers: range) -> Row:
    """Sequences of a set as they follow each other."""
    if not data.contiguous:
        return Chain(data, np.arange(numbers.start, numbers.stop, dtype=np.int32))
    first = int(data.starts[numbers.start])
    last = int(data.starts[numbers.stop - 1]) + int(data.sizes[numbers.stop - 1])
    begins = data.starts[numbers.start : numbers.stop] - first
    return Flat(str(data.prefix), data.tokens[first:last], begins)


def _as_megatron(config: Config) -> Opened:
    """As the reference would for this many steps, from train.seed."""
    data, train = config.data, config.train
    prefixes = _prefixes(data.paths)
    weights = [weight / sum(data.weights) for weight in data.weights] if data.weights else [1.0]
    if len(prefixes) != len(weights):
        raise UserError(f"data.paths: {len(prefixes)} sets; data.order=megatron wants one, or data.weights for each")
    total = train.steps * train.global_batch
    sources: list[Source] = []
    helds: list[Source] = []
    for prefix, weight in zip(prefixes, weights, strict=True):
        tokens = Indexed(prefix)
        wanted = total if len(prefixes) == 1 else ceil(ceil(total * weight) * MORE)
        own, held, _ = megatron_order.split(data.split or "1,0,0", len(tokens))
        sources.append(
            megatron_order.MegatronOrder(
                tokens, own, wanted, data.sequence, train.seed, config.model.vocab, data.separate, data.mask_ends
            )
        )
        helds += _rows(config, tokens, held)
    held_out = Joined(helds) if helds else None
    if len(sources) == 1:
        return Opened(sources[0], held_out, False)
    return Opened(Listed(sources, *megatron_order.blend(weights, total)), held_out, False)


def read_text(config: Config, paths: tuple[str, ...], say: Say) -> Flat:
    """Every document through the tokenizer, the end token after each, in memory."""
    data = config.data
    tokenizer = open_tokenizer(spec_of(config))
    if tokenizer.vocab > config.model.vocab:
        raise UserError(
            f"model.vocab={config.model.vocab}: the tokenizer has {tokenizer.vocab} tokens; nearest: {tokenizer.vocab}"
        )
    rows: list[NDArray[np.int32]] = []
    counts: list[NDArray[np.int64]] = []

    def add(texts: list[str]) -> None:
        tokens, sizes = tokenizer.encode(texts)
        rows.append(np.insert(tokens, np.cumsum(sizes), tokenizer.end))
        counts.append(sizes + 1)

    if not paths:
        if data.tokenizer != "bytes":
            raise UserError(
                "data.paths: missing; name the text files (or use data.tokenizer=bytes for the built-in text)"
            )
        add(stories(STORIES))
    for path in _files(paths, directories=True):
        say(f"reading {path}")
        known = path.is_dir() or path.suffix in (*documents.LINES, *documents.COMPRESSED, ".parquet")
        for piece in documents.pieces([path]) if known else [Piece(path, "text", 0, 0, None, 0)]:
            texts = []
            for found in documents.read(piece, ["text"]):
                if isinstance(found, Bad):
                    raise UserError(f"{found.path}: {found.place}: {found.why}")
                texts.append(found[0])
            add(texts)
    ends = np.cumsum(np.concatenate(counts))
    return Flat(", ".join(paths) or "the built-in text", np.concatenate(rows), ends - np.concatenate(counts))


def spec_of(config: Config) -> Spec:
    data = config.data
    return Spec(data.tokenizer, data.vocab_file, data.merges_file, data.end_of_text)


def _prefixes(paths: Sequence[str]) -> list[Path]:
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


def _files(paths: Sequence[str], directories: bool = False) -> list[Path]:
    found: list[Path] = []
    for pattern in paths:
        matches = [Path(match) for match in sorted(glob.glob(str(Path(pattern).expanduser())))]
        files = [match for match in matches if match.is_file() or (directories and match.is_dir())]
        if not files:
            raise UserError(f"data.paths={pattern}: no such file; give text files, or --smoke for a trial without data")
        found += files
    return found
