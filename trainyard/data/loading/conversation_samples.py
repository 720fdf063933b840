"""Conversations as documents of tokens with a mask, encoded once.

Rendering and tokenizing take long, so worker processes do it, and the result is in a directory of the user's cache that
every reader maps into memory. Its name is a hash of the records, the tokenizer, the template and the keys that decide
about tokens; data.seq_len is none of them.
"""

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.config.data_schema import DataSection
from trainyard.core.atomic_files import atomic_directory
from trainyard.core.errors import UserError
from trainyard.core.file_lock import file_lock
from trainyard.core.quantities import counted
from trainyard.core.user_cache import user_cache
from trainyard.core.worker_pool import map_ordered
from trainyard.data.formats.documents import InputSlice, describe_place, read_records, record_slices
from trainyard.data.loading.data_files import match_files
from trainyard.data.loading.demo_corpus import conversation_lines
from trainyard.data.loading.text_stream import check_vocab_size, tokenizer_spec
from trainyard.data.text.chat_encoder import ChatSpec, chat_encoder, read_template
from trainyard.data.text.chat_template import CHATML
from trainyard.data.text.tokenizer import load_tokenizer, model_tokenizer_files
from trainyard.remote.chunks.remote_path import DataPath, RemoteFiles, RemotePath

logger = logging.getLogger(__name__)

CACHE_VERSION = "3"
"""Changes with the rules by which records become tokens."""
LOG_INTERVAL_S = 2.0
BYTES_PER_WORKER = 4 << 20
MAX_WORKERS = 16
BLOCK_BYTES = 1 << 24
BUILT_IN = Path("built-in conversations")
BUILT_IN_COUNT = 2000


class Problem(NamedTuple):
    slice_index: int
    place: int
    reason: str


class EncodedConversations(NamedTuple):
    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    places: NDArray[np.int64]
    splits: NDArray[np.int64]
    values: NDArray[np.float32]
    end_ids: frozenset[int]
    problems: list[tuple[int, str]]


class ConversationSamples:
    """Documents of tokens: `lengths` [documents], and `document(index)` -> (tokens, trained)."""

    def __init__(
        self, directory: Path, slices: Sequence[InputSlice], seq_len: int, too_long: str, noun: str = "conversation"
    ) -> None:
        """`noun` says what fits in a sample: a conversation, a pair, or only each answer of one."""
        self.slices, self.noun, apart = slices, noun, noun == "answer"
        info = json.loads((directory / "info.json").read_text())
        self.end_ids: tuple[int, ...] = tuple(info["end_ids"])
        """The tokens that end trained answers."""
        self._bounds: NDArray[np.int64] = np.load(directory / "bounds.npy")
        self._places: NDArray[np.int64] = np.load(directory / "places.npy")
        self._splits: NDArray[np.int64] = np.load(directory / "splits.npy")
        self._values: NDArray[np.float32] = np.load(directory / "values.npy")
        self._tokens = np.asarray(np.memmap(directory / "tokens.bin", np.int32, "r"))
        self._trained = np.asarray(np.memmap(directory / "trained.bin", np.bool_, "r"))
        lengths = np.diff(self._bounds)
        self._kept = np.arange(len(lengths))
        needed = np.maximum(self._splits, lengths - self._splits) if apart else lengths
        if (longer := np.flatnonzero(needed > seq_len)).size:
            self._kept = self._shorten(longer, needed, seq_len, too_long)
        lengths = lengths[self._kept]
        self.lengths: NDArray[np.int32] = (lengths if apart else np.minimum(lengths, seq_len)).astype(np.int32)
        """Tokens of each document."""
        self.splits, self.values = self._splits[self._kept], self._values[self._kept]
        """Where the rejected answer of a pair begins with its prompt (0: the document is one conversation), and what
        records say: the margins of pairs, and 1 for good single answers."""

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Its tokens, and which of them are trained."""
        start = self._bounds[self._kept[index]]
        span = slice(start, start + self.lengths[index])
        return self._tokens[span], self._trained[span]

    def split(self, index: int) -> int:
        return int(self.splits[index])

    def value(self, index: int) -> float:
        return float(self.values[index])

    def longest_answer(self) -> tuple[int, int]:
        """The record with the longest answer, and the tokens of that with its prompt."""
        tokens = np.maximum(self.splits, self.lengths - self.splits)
        return int(tokens.argmax()), int(tokens.max())

    def source(self, index: int) -> str:
        """Where a document comes from, for people."""
        return self._describe(int(self._kept[index]))

    def _describe(self, document: int) -> str:
        slice_index, place = self._places[document].tolist()
        return describe_place(self.slices[slice_index], place)

    def _shorten(
        self, longer: NDArray[np.int64], lengths: NDArray[np.int64], seq_len: int, too_long: str
    ) -> NDArray[np.int64]:
        """The documents that are left, as data.chat.too_long says."""
        total, first = len(lengths), int(longer[0])
        found = f"{counted(len(longer), self.noun, ',')} of {total:,}"
        if too_long == "error":
            raise UserError(
                f"{self._describe(first)}: {lengths[first]:,} tokens, but data.seq_len={seq_len}; {found} "
                f"{'is' if len(longer) == 1 else 'are'} longer, at most {lengths.max():,}; "
                f"nearest: data.seq_len={lengths.max()}, or data.chat.too_long="
                f"{'truncate or drop' if self.noun == 'conversation' else 'drop'}"
            )
        dropped = longer
        if too_long == "truncate":
            starts = self._bounds[longer]
            kept = [self._trained[start + 1 : start + seq_len].any() for start in starts.tolist()]
            dropped = longer[~np.array(kept, np.bool_)]
            cut = len(longer) - len(dropped)
            logger.warning("data.chat.too_long=truncate: cut %s of %s to %s tokens", f"{cut:,}", f"{total:,}", seq_len)
        if len(dropped):
            reason = "" if too_long == "drop" else ", which have no trained token before that"
            logger.warning(
                "data.chat.too_long=%s: dropped %s of %s%s", too_long, f"{len(dropped):,}", f"{total:,}", reason
            )
        if len(dropped) == total:
            raise UserError(f"data.seq_len={seq_len}: no {self.noun} is as short; nearest: {lengths.min()}")
        return np.setdiff1d(np.arange(total), dropped)


def chat_spec(data: DataSection, new_tokens: tuple[str, ...]) -> ChatSpec:
    template = read_template(data.chat.template)
    if template is None and data.tokenizer == "bytes":
        template = CHATML
    pairs = data.has_flag("has_pairs")
    return ChatSpec(tokenizer_spec(data, new_tokens), template, data.chat.train_on, data.chat.format, pairs)


def open_conversations(
    data: DataSection,
    paths: Sequence[str],
    remote: RemoteFiles | None,
    model_vocab: int | None = None,
    new_tokens: tuple[str, ...] = (),
    apart: bool = False,
) -> ConversationSamples:
    """The conversations of files, encoded by this process or by another one before; without `paths`, built-in ones.
    `apart`: samples need not hold both answers of a pair."""
    if model_vocab is not None:
        check_vocab_size(load_tokenizer(tokenizer_spec(data, new_tokens)), model_vocab)
    if paths:
        slices = list(record_slices(match_files(paths, directories=True, remote=remote)))
    elif data.tokenizer == "bytes":
        lines = conversation_lines(BUILT_IN_COUNT, data.has_flag("has_pairs"))
        slices = [InputSlice(BUILT_IN, "lines", 0, len(lines), lines)]
    else:
        raise UserError(
            "data.paths: missing; set it to conversations (or data.tokenizer=bytes for the built-in conversations)"
        )
    spec = chat_spec(data, new_tokens)
    directory = user_cache("chat", is_writable=True) / _cache_key(spec, slices)
    directory.parent.mkdir(parents=True, exist_ok=True)
    if not (directory / "info.json").exists():
        waiting = partial(logger.info, "waiting for another process that encodes %s", ", ".join(paths))
        with file_lock(directory.parent / f"{directory.name}.lock", waiting):
            if not (directory / "info.json").exists():
                _encode(directory, spec, slices)
    noun = "answer" if apart else "pair" if spec.pairs else "conversation"
    return ConversationSamples(directory, slices, data.seq_len, data.chat.too_long, noun)


def _cache_key(spec: ChatSpec, slices: Sequence[InputSlice]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(
        json.dumps(
            [
                CACHE_VERSION,
                spec.template,
                spec.train_on,
                spec.format,
                spec.pairs,
                spec.tokenizer.end_token,
                spec.tokenizer.new_tokens,
            ]
        ).encode()
    )
    for name, content in sorted(model_tokenizer_files(spec.tokenizer).items()):
        digest.update(f"{name} {len(content)} ".encode() + content)
    for path in dict.fromkeys(each.path for each in slices):
        digest.update(slices[0].data or b"" if path == BUILT_IN else _content_hash(path))
    return digest.hexdigest()


def _content_hash(path: DataPath) -> bytes:
    if isinstance(path, RemotePath):
        stored = path.source().stored
        return f"{path} {stored.size} {stored.version}".encode()
    state = path.stat()
    return _file_hash(path, state.st_size, state.st_mtime_ns)


@cache
def _file_hash(path: Path, size: int, modified_ns: int) -> bytes:
    """Size and time tell whether a file is as it was: a process opens its data more than once."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.digest()


def _encode(directory: Path, spec: ChatSpec, slices: Sequence[InputSlice]) -> None:
    """Write the cache. Raises UserError if a record cannot be trained on."""
    chat_encoder(spec)  # mistakes in the tokenizer and the template first, and once
    total, done, start = sum(each.input_bytes for each in slices), 0, time.monotonic()
    workers = max(min(os.cpu_count() or 1, total // BYTES_PER_WORKER, MAX_WORKERS), 1)
    if any(isinstance(each.path, RemotePath) for each in slices):
        workers = 1  # the cache of remote files is that of this process
    logged, lengths, places = start, [np.zeros(0, np.int64)], [np.zeros((0, 2), np.int64)]
    splits, values = [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
    problems: list[Problem] = []
    end_ids: set[int] = set()
    with atomic_directory(directory) as temporary:
        with (temporary / "tokens.bin").open("wb") as tokens, (temporary / "trained.bin").open("wb") as trained:
            encoded_slices = map_ordered(partial(encode_slice, spec), slices, workers)
            for index, encoded in enumerate(encoded_slices):
                tokens.write(encoded.tokens.tobytes())
                trained.write(encoded.trained.tobytes())
                lengths.append(encoded.lengths)
                places.append(np.stack((np.full_like(encoded.places, index), encoded.places), axis=1))
                splits.append(encoded.splits)
                values.append(encoded.values)
                end_ids |= encoded.end_ids
                problems += [Problem(index, place, reason) for place, reason in encoded.problems]
                done, now = done + slices[index].input_bytes, time.monotonic()
                if now - logged > LOG_INTERVAL_S:
                    left = (now - start) / done * (total - done)
                    logger.info("encoding conversations: %.0f%%, %.0f s left", 100 * done / total, left)
                    logged = now
        count = sum(map(len, lengths))
        if problems:
            _raise_problems(problems, slices, count + len(problems))
        if not count:
            noun = "record" if spec.pairs else "conversation"
            raise UserError(f"{slices[0].path if slices else 'data.paths'}: no {noun}")
        np.save(temporary / "bounds.npy", np.concatenate(([0], np.cumsum(np.concatenate(lengths)))))
        np.save(temporary / "places.npy", np.concatenate(places))
        np.save(temporary / "splits.npy", np.concatenate(splits))
        np.save(temporary / "values.npy", np.concatenate(values))
        (temporary / "info.json").write_text(json.dumps({"end_ids": sorted(end_ids)}))


def encode_slice(spec: ChatSpec, input_slice: InputSlice) -> EncodedConversations:
    encoder = chat_encoder(spec)
    tokens, trained = [np.zeros(0, np.int32)], [np.zeros(0, np.bool_)]
    places: list[int] = []
    splits: list[int] = []
    values: list[float] = []
    problems: list[tuple[int, str]] = []
    end_ids: frozenset[int] = frozenset()
    for place, record in read_records(input_slice):
        if isinstance(record, str):
            problems.append((place, record))
            continue
        try:
            encoded = encoder.encode_record(record)
        except UserError as error:
            problems.append((place, str(error)))
            continue
        tokens.append(encoded.tokens)
        trained.append(encoded.trained)
        places.append(place)
        splits.append(encoded.split)
        values.append(encoded.value)
        end_ids |= encoded.end_ids
    lengths = np.array([len(each) for each in tokens[1:]], np.int64)
    joined = np.concatenate(tokens), np.concatenate(trained)
    where = np.array(places, np.int64), np.array(splits, np.int64)
    return EncodedConversations(*joined, lengths, *where, np.array(values, np.float32), end_ids, problems)


def _raise_problems(problems: Sequence[Problem], slices: Sequence[InputSlice], total: int) -> None:
    """The first record with a problem, and how many have the same."""
    counts = Counter(problem.reason for problem in problems)
    first = problems[0]
    place, same = describe_place(slices[first.slice_index], first.place), counts[first.reason]
    others = len(problems) - same
    also = f"; {counted(others, 'record')} {'has' if others == 1 else 'have'} other problems" if others else ""
    have = f"{counted(same, 'record', ',')} of {total:,} {'has' if same == 1 else 'have'} this problem"
    raise UserError(f"{place}: {first.reason} ({have}{also})")
