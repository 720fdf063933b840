"""Data sets of an evaluation: files of any kind, cut into windows in which every token is scored at most once.

Token files and text are streams, as in training: all documents one after the other, in text with the end token after
each. Every token of a stream except the first is scored exactly once, whatever the window and the stride. Packed rows
and sentence pairs are scored as they are stored.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from trainyard.config.data_schema import DataSection
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.data.formats.documents import match_paths
from trainyard.data.formats.megatron_bin import MegatronTokens, is_token_file
from trainyard.data.loading.data_files import token_prefixes
from trainyard.data.loading.dataset import Dataset, Indices, concatenate
from trainyard.data.loading.text_stream import check_vocab_size, encode_documents, text_blocks
from trainyard.data.loading.token_samples import TokenSamples, TokenStream, token_stream
from trainyard.data.samples import Sample
from trainyard.data.text.tokenizer import Tokenizer
from trainyard.families import ModelConfig, family_of

HDF5_SUFFIXES = (".hdf5", ".h5")
ARROW_STATE_FILE = "state.json"


@dataclass(frozen=True)
class EvaluationData:
    """One row of the report."""

    name: str
    dataset: Dataset
    seq_len: int
    """Tokens per sample."""
    max_predictions: int | None = None
    """Masked tokens per sample (BERT)."""
    count_bytes: Callable[[], int] | None = None
    """Counts the bytes of the UTF-8 text that the scored tokens decode to; None if they cannot be decoded."""


class TokenWindows(TokenSamples):
    """Windows of a stream, `stride` tokens apart. All but the first score only their last `stride` labels, for which
    the tokens before them are context. The last window may be partial."""

    def __init__(
        self,
        stream: TokenStream,
        seq_len: int,
        vocab_size: int,
        document_mask: bool = False,
        mask_eod_loss: bool = False,
        stride: int | None = None,
    ) -> None:
        super().__init__(stream, seq_len, vocab_size, document_mask, mask_eod_loss)
        self.stride = stride or seq_len

    def __len__(self) -> int:
        num_labels = len(self.stream) - 1
        return 1 - (-max(num_labels - self.seq_len, 0) // self.stride) if num_labels > 0 else 0

    def samples(self, indices: Indices) -> Sample:
        sample = super().samples(indices)
        if self.stride < self.seq_len:
            labels = sample["labels"] = sample["labels"].copy()
            labels[indices > 0, : self.seq_len - self.stride] = IGNORE_INDEX
        return sample


@dataclass(frozen=True)
class DataOptions:
    """How the data arguments of one evaluation are read."""

    model: ModelConfig
    data: DataSection
    tokenizer: Tokenizer | None
    stride: int | None = None
    """Tokens between the starts of windows. Default: seq_len, windows without overlap."""
    text_key: str = "text"
    """JSON key or column that holds the text."""
    seq_len_is_given: bool = False
    """The user chose data.seq_len; otherwise stored samples have their own."""


def open_data(name: str, arguments: Sequence[str], options: DataOptions) -> EvaluationData:
    """Open the data that `arguments` name: each a file, a glob, a directory or the prefix of token files."""
    paths: list[Path] = []
    are_tokens = []
    for argument in arguments:
        matches = match_paths(argument)
        are_tokens.append(is_token_file(Path(argument)) or (bool(matches) and all(map(is_token_file, matches))))
        if not matches and not are_tokens[-1]:
            raise UserError(f"{argument}: no such file; DATA is text, token files, packed rows or HDF5")
        paths += matches
    if not family_of(options.model).is_causal:
        return _open_sentence_pairs(name, paths, options)
    if all(are_tokens):
        token_files = map(MegatronTokens, token_prefixes(arguments))
        return _windows(name, [token_stream(files, range(len(files))) for files in token_files], options)
    if any(path.suffix in HDF5_SUFFIXES for path in paths):
        raise UserError(f"{name}: masked sentence pairs, but {options.model.family} is a causal model")
    if all((path / ARROW_STATE_FILE).is_file() for path in paths) and not _has_column(paths[0], options.text_key):
        return _open_packed_rows(name, paths, options)
    return _open_text(name, paths, options)


def _open_text(name: str, paths: list[Path], options: DataOptions) -> EvaluationData:
    if options.tokenizer is None:
        raise UserError(f"{name}: the checkpoint has no tokenizer for text; pass --tokenizer")
    check_vocab_size(options.tokenizer, options.model.vocab)
    stream = encode_documents(text_blocks(paths, options.text_key), options.tokenizer, name)
    return _windows(name, [stream], options)


def _windows(name: str, streams: list[TokenStream], options: DataOptions) -> EvaluationData:
    data, stride = options.data, options.stride
    if stride and not 1 <= stride <= data.seq_len:
        raise UserError(f"--stride {stride}: must be 1 to data.seq_len={data.seq_len}; nearest: {data.seq_len}")
    shape = (data.seq_len, options.model.vocab, data.document_mask, data.mask_eod_loss, stride)
    windows: list[Dataset] = [TokenWindows(stream, *shape) for stream in streams]
    if not sum(map(len, windows)):
        raise UserError(f"{name}: has no token to predict: fewer than two tokens")
    count_bytes = partial(stream_bytes, streams, options.tokenizer, data.mask_eod_loss) if options.tokenizer else None
    return EvaluationData(name, concatenate(windows), data.seq_len, count_bytes=count_bytes)


def _open_packed_rows(name: str, paths: list[Path], options: DataOptions) -> EvaluationData:
    from trainyard.data.formats.arrow_dataset import ArrowDataset, row_length

    data = options.data
    if options.stride:
        raise UserError(f"--stride {options.stride}: {name} has packed rows, which cannot overlap")
    seq_len = data.seq_len if options.seq_len_is_given else row_length(paths[0])
    rows = ArrowDataset(paths, seq_len, data.document_mask, options.model.vocab)

    def count_bytes(tokenizer: Tokenizer) -> int:
        labels = (rows.samples(np.array([index]))["labels"][0] for index in range(len(rows)))
        return row_bytes((row[row != IGNORE_INDEX].tolist() for row in labels), tokenizer)

    bound = partial(count_bytes, options.tokenizer) if options.tokenizer else None
    return EvaluationData(name, rows, seq_len, count_bytes=bound)


def _open_sentence_pairs(name: str, paths: list[Path], options: DataOptions) -> EvaluationData:
    from trainyard.data.formats.bert_hdf5 import read_shape
    from trainyard.data.formats.bert_hdf5_cache import BertHdf5Dataset

    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    files = [file for file in files if file.suffix in HDF5_SUFFIXES]
    if not files:
        raise UserError(f"{name}: BERT is evaluated on masked sentence pairs in HDF5 (trainyard data bert)")
    shapes = [read_shape(file) for file in files]
    seq_len, max_predictions = shapes[0].seq_len, max(shape.max_predictions for shape in shapes)
    pairs = BertHdf5Dataset(files, seq_len, max_predictions)
    if pairs.vocab_size > options.model.vocab:
        raise UserError(f"{name}: has token {pairs.vocab_size - 1}, but model.vocab={options.model.vocab}")
    return EvaluationData(name, pairs, seq_len, max_predictions)


def _has_column(directory: Path, name: str) -> bool:
    from trainyard.data.formats.arrow_dataset import data_files, open_stream

    files = data_files(directory)
    return bool(files) and name in open_stream(files[0]).schema.names


def row_bytes(rows: Iterable[list[int]], tokenizer: Tokenizer) -> int:
    """Bytes of the texts that rows of tokens decode to, without special tokens."""
    special_ids = tokenizer.special_ids
    texts = (tokenizer.decode([token for token in row if token not in special_ids]) for row in rows)
    return sum(len(text.encode()) for text in texts)


def stream_bytes(streams: Iterable[TokenStream], tokenizer: Tokenizer, skip_document_starts: bool) -> int:
    """Bytes of the texts of streams without their first tokens, which are not scored; with `skip_document_starts`,
    without the first token of every document. Documents are decoded one by one."""

    def documents() -> Iterator[list[int]]:
        for stream in streams:
            starts = stream.document_starts(0, len(stream)).tolist()
            bounds = [*starts, len(stream)] if starts and starts[0] == 0 else [0, *starts, len(stream)]
            for start, end in pairwise(bounds):
                first = start + int(start == 0 or skip_document_starts)
                if first < end:
                    yield stream.tokens(first, end - first).tolist()

    return row_bytes(documents(), tokenizer)
