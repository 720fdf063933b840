"""Inspection of data files: counts, lengths, samples, and with `check` the validation of every value.

Each kind of file has a function that fills an InspectReport. Files are read in blocks, so memory stays small. With
`check`, the first invalid value raises an error that names its position.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.config.registries import SOURCES
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.user_code import load_object
from trainyard.data.formats import documents
from trainyard.data.formats.arrow_dataset import data_files, list_column, open_stream
from trainyard.data.formats.bert_hdf5 import open_hdf5
from trainyard.data.formats.megatron_bin import MegatronTokens, prefix_of
from trainyard.remote.chunks.remote_path import DataPath

ELEMENTS_PER_READ = 1 << 22
SAMPLE_TOKENS = 48
"""Tokens shown of a sample."""
SAMPLE_CHARACTERS = 200
"""Characters shown of a text sample."""
DOCUMENT_KINDS = {
    ".txt": "text",
    ".parquet": "Parquet",
    **dict.fromkeys((".json", ".jsonl", *documents.COMPRESSION_BY_SUFFIX), "JSON lines"),
}
MAX_COMPRESSION_RATIO = 1100
"""Bound on the size of HDF5 data divided by the size of its file; more means that the file is damaged."""

Excerpt = tuple[str, list[int] | str]
"""Location of a sample, and the first of its tokens or characters."""
OnProgress = Callable[[int, int], None]
"""Called with the bytes read and the total."""


class InspectOptions(NamedTuple):
    check: bool = False
    """Read and validate every value."""
    num_samples: int = 0
    """Samples to show."""
    vocab_size: int | None = None
    """Token ids must be below this; None: below 2^31."""
    end_token: int | None = None
    """Token id that ends a document; None: the most frequent last token."""
    text_key: str = "text"
    """Key or column of the text in a document."""


class InspectReport(NamedTuple):
    path: str
    kind: str
    facts: dict[str, Any]
    """Counts and types by name."""
    lengths: dict[str, dict[str, Any]]
    """Length statistics by what was measured, such as `tokens per document`."""
    samples: list[Excerpt]


class LengthStats:
    """Counts of each length: enough for exact statistics, and far fewer than documents."""

    def __init__(self, *lengths: NDArray[Any]) -> None:
        self.counts: Counter[int] = Counter()
        for values in lengths:
            self.add(values)

    def add(self, lengths: NDArray[Any]) -> None:
        self.counts.update(count_values(lengths))

    def summary(self) -> dict[str, Any]:
        """Shortest, median, mean, longest, and a histogram with bins 0, 1, 2 to 3, 4 to 7, ..."""
        if not self.counts:
            return {}
        lengths = np.array(sorted(self.counts))
        counts = np.array([self.counts[length] for length in lengths.tolist()])
        ends, total = np.cumsum(counts), int(counts.sum())
        middle = [int(lengths[np.searchsorted(ends, rank, side="right")]) for rank in ((total - 1) // 2, total // 2)]
        bins: Counter[int] = Counter()
        for length, count in self.counts.items():
            bins[length.bit_length()] += count
        return {
            "shortest": int(lengths[0]),
            "median": sum(middle) / 2,
            "mean": float((lengths * counts).sum() / total),
            "longest": int(lengths[-1]),
            "histogram": [
                {"from": 1 << bits >> 1, "to": (1 << bits) - 1, "count": bins[bits]}
                for bits in range(min(bins), max(bins) + 1)
            ],
        }


def count_values(values: NDArray[Any]) -> dict[int, int]:
    """The count of each value, by value, in increasing order."""
    return dict(zip(*(array.tolist() for array in np.unique(values, return_counts=True)), strict=True))


def check_range(path: str, values: NDArray[Any], position: int, limit: int, name: str = "token") -> None:
    """Raise unless all values are 0 to `limit` - 1. `position` is that of the first value in its file."""
    if values.size and (values.min() < 0 or values.max() >= limit):
        index = int(((values < 0) | (values >= limit)).argmax())
        raise UserError(f"{path}: {name} {values[index]} at {position + index}; expected 0 to {limit - 1}")


def evenly_spaced(count: int, num_samples: int) -> list[int]:
    """`num_samples` indices below `count`, evenly spaced; all indices if there are fewer."""
    return [index * count // num_samples for index in range(num_samples)] if count > num_samples else [*range(count)]


def inspect_path(path: Path, options: InspectOptions, on_progress: OnProgress) -> InspectReport:
    """Inspect a file or directory as the data source that recognizes it; by default as documents."""
    path = path.expanduser()
    for source in map(SOURCES.find, SOURCES.names()):
        if source.inspector and source.recognizes(path):
            report: InspectReport = load_object(source.inspector, "a function")(path, options, on_progress)
            return report
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: no such file")
    return _inspect_documents(path, options, on_progress)


def inspect_tokens(path: Path, options: InspectOptions, on_progress: OnProgress) -> InspectReport:
    prefix = prefix_of(path)
    data = MegatronTokens(prefix)
    lengths = np.diff(data.sequence_bounds[data.document_bounds])
    facts = {
        "dtype": data.dtype.name,
        "documents": len(lengths),
        "empty documents": int((lengths == 0).sum()),
        "sequences": len(data),
        "tokens": int(data.sequence_lengths.sum(dtype=np.int64)),
        "bytes": sum(Path(f"{prefix}{suffix}").stat().st_size for suffix in (".bin", ".idx")),
    }
    by_document, by_sequence = LengthStats(lengths), LengthStats(data.sequence_lengths)
    stats = {"tokens per document": by_document.summary()}
    if by_sequence.counts != by_document.counts:
        stats["tokens per sequence"] = by_sequence.summary()
    samples: list[Excerpt] = []
    for document in evenly_spaced(len(lengths), options.num_samples):
        first, last = data.document_bounds[document : document + 2].tolist()
        tokens: list[int] = []
        while first < last and len(tokens) < SAMPLE_TOKENS:
            tokens += data.sequence(first)[: SAMPLE_TOKENS - len(tokens)].tolist()
            first += 1
        samples.append((f"document {document}", tokens))
    if options.check:
        facts |= _check_megatron(data, options, on_progress)
    return InspectReport(str(prefix), "token files (.bin and .idx)", facts, stats, samples)


def _check_megatron(data: MegatronTokens, options: InspectOptions, on_progress: OnProgress) -> dict[str, Any]:
    last_tokens = np.unique(data.sequence_bounds[data.document_bounds])[1:] - 1
    end_counts: Counter[int] = Counter()
    for start in range(0, len(data.tokens), ELEMENTS_PER_READ):
        tokens = data.tokens[start : start + ELEMENTS_PER_READ]
        check_range(f"{data.prefix}.bin", tokens, start, options.vocab_size or 2**31)
        here = last_tokens[slice(*np.searchsorted(last_tokens, (start, start + len(tokens))))] - start
        end_counts.update(count_values(tokens[here]))
        on_progress((start + len(tokens)) * data.dtype.itemsize, data.tokens.nbytes)
    end_token = options.end_token
    if end_token is None:
        end_token = max(end_counts, key=end_counts.__getitem__, default=0)
    return {"checked": "all tokens", "end token": end_token, "documents ending with it": end_counts[end_token]}


def inspect_arrow(directory: Path, options: InspectOptions, on_progress: OnProgress) -> InspectReport:
    files = data_files(directory)
    schema = open_stream(files[0]).schema if files else None
    if schema and "input_ids" not in schema.names:
        return _inspect_documents(directory, options, on_progress)
    size = sum(file.stat().st_size for file in directory.iterdir())
    stats, limit = LengthStats(), options.vocab_size or 2**31
    num_rows = num_tokens = spans = ignored = done = 0
    for file in files:
        for batch in open_stream(file).batches:
            lengths, values = list_column(file, batch, "input_ids")
            stats.add(lengths)
            if options.check:
                check_range(str(file), values, num_tokens, limit)
                batch_ignored, batch_spans = _check_columns(file, batch, lengths, num_tokens, limit)
                ignored, spans = ignored + batch_ignored, spans + batch_spans
                done += batch.nbytes
                on_progress(done, size)
            num_rows += batch.num_rows
            num_tokens += len(values)
    facts = {
        "columns": {name: str(kind) for name, kind in zip(schema.names, schema.types, strict=True)} if schema else {},
        "files": len(files),
        "sequences": num_rows,
        "tokens": num_tokens,
        "bytes": size,
    }
    if options.check:
        facts |= {"checked": "all rows", "ignored labels": ignored}
        if schema and "position_ids" in schema.names:
            facts["document spans"] = spans
    samples = _row_samples(num_rows, options, lambda row: _arrow_sample(files, row))
    lengths_by_name = {"tokens per sequence": stats.summary()}
    return InspectReport(str(directory), "Arrow dataset (save_to_disk)", facts, lengths_by_name, samples)


def _check_columns(
    file: DataPath, batch: Any, lengths: NDArray[np.int64], position: int, limit: int
) -> tuple[int, int]:
    """Check the columns next to input_ids; returns the number of ignored labels and of document spans."""
    ignored = spans = 0
    for name in ("attention_mask", "labels", "position_ids"):
        if name not in batch.schema.names:
            continue
        column_lengths, values = list_column(file, batch, name)
        if not np.array_equal(column_lengths, lengths):
            raise UserError(f"{file}: a row of {name!r} has not the length of its input_ids")
        if name == "attention_mask":
            check_range(str(file), values, position, 2, "attention_mask")
        elif name == "labels":
            ignored = int(np.count_nonzero(values == IGNORE_INDEX))
            check_range(str(file), np.where(values == IGNORE_INDEX, 0, values), position, limit, "label")
        elif len(values):
            check_range(str(file), values, position, 2**31, "position")
            starts = np.append(True, values[1:] != values[:-1] + 1)
            starts[(np.cumsum(lengths) - lengths)[lengths > 0]] = True
            spans = int(np.count_nonzero(starts))
    return ignored, spans


def _arrow_sample(files: list[DataPath], row: int) -> list[int]:
    for file in files:
        for batch in open_stream(file).batches:
            if row < batch.num_rows:
                lengths, values = list_column(file, batch, "input_ids")
                start = int(lengths[:row].sum())
                return values[start : start + min(lengths[row], SAMPLE_TOKENS)].tolist()
            row -= batch.num_rows
    raise AssertionError(row)


def _inspect_documents(path: Path, options: InspectOptions, on_progress: OnProgress) -> InspectReport:
    stats, size = LengthStats(), documents.total_bytes([path])
    num_documents = empty = characters = unreadable = done = 0
    samples: list[Excerpt] = []
    for input_slice in documents.input_slices([path]):
        texts, skipped = documents.read_documents(input_slice, [options.text_key])
        if skipped and options.check:
            raise UserError(str(skipped[0]))
        for index, (text,) in enumerate(texts[: max(options.num_samples - num_documents, 0)], num_documents):
            samples.append((f"document {index}", text[:SAMPLE_CHARACTERS]))
        lengths = [len(text) for (text,) in texts]
        stats.add(np.array(lengths, np.int64))
        num_documents, characters = num_documents + len(lengths), characters + sum(lengths)
        empty, unreadable = empty + lengths.count(0), unreadable + len(skipped)
        done += input_slice.input_bytes
        on_progress(done, size)
    facts = {
        "documents": num_documents,
        "empty documents": empty,
        "malformed": unreadable,
        "characters": characters,
        "bytes": size,
        **({"checked": "all documents"} if options.check else {}),
    }
    kind = f"documents ({DOCUMENT_KINDS.get(path.suffix, path.suffix or 'a directory')})"
    return InspectReport(str(path), kind, facts, {"characters per document": stats.summary()}, samples)


def inspect_hdf5(path: Path, options: InspectOptions, on_progress: OnProgress) -> InspectReport:
    with open_hdf5(path) as file:
        return _inspect_hdf5(path, file, options, on_progress)


def _inspect_hdf5(path: Path, file: Any, options: InspectOptions, on_progress: OnProgress) -> InspectReport:
    """Inspect BERT samples: padded sentence pairs, one per row."""
    datasets = {name: file[name] for name in file}
    input_ids = datasets.get("input_ids")
    if input_ids is None or len(getattr(input_ids, "shape", ())) != 2:
        raise UserError(f"{path}: no dataset 'input_ids' with two dimensions; has: {', '.join(datasets) or 'nothing'}")
    (num_rows, width), file_bytes = input_ids.shape, path.stat().st_size
    for name, dataset in datasets.items():
        if not getattr(dataset, "shape", ()) or dataset.shape[0] != num_rows or dataset.dtype.kind not in "iu":
            raise UserError(
                f"{path}: {name!r} does not have {counted(num_rows, 'row')} of integers, as 'input_ids' has"
            )
        if name in ("input_mask", "segment_ids") and dataset.shape != input_ids.shape:
            raise UserError(f"{path}: {name!r} is {list(dataset.shape)}, but 'input_ids' {list(input_ids.shape)}")
        if dataset.nbytes > MAX_COMPRESSION_RATIO * file_bytes:
            raise UserError(f"{path}: {name!r} is {list(dataset.shape)}, more than the file can hold; it is damaged")
    limits = {"input_mask": 2, "segment_ids": 2, "masked_lm_positions": width, "next_sentence_labels": 2}
    stats, num_tokens = LengthStats(), 0
    rows_per_read = max(ELEMENTS_PER_READ // max(width, 1), 1)
    for start in range(0, num_rows, rows_per_read):
        rows = slice(start, min(start + rows_per_read, num_rows))
        lengths = np.full(rows.stop - start, width)
        if "input_mask" in datasets:
            lengths = np.count_nonzero(datasets["input_mask"][rows], axis=1)
        stats.add(lengths)
        num_tokens += int(lengths.sum())
        for name, dataset in datasets.items() if options.check else ():
            position = start * (dataset.shape[1] if len(dataset.shape) > 1 else 1)
            limit = limits.get(name, options.vocab_size or 2**31)
            check_range(str(path), dataset[rows].reshape(-1), position, limit, name)
        on_progress(file_bytes * rows.stop // num_rows, file_bytes)
    facts = {
        "columns": {name: f"{dataset.dtype} {list(dataset.shape)}" for name, dataset in datasets.items()},
        "sequences": num_rows,
        "tokens": num_tokens,
        "bytes": file_bytes,
        **({"checked": "all rows"} if options.check else {}),
    }
    samples = _row_samples(num_rows, options, lambda row: input_ids[row][:SAMPLE_TOKENS].tolist())
    return InspectReport(str(path), "HDF5 (BERT)", facts, {"tokens per sequence": stats.summary()}, samples)


def _row_samples(num_rows: int, options: InspectOptions, read: Callable[[int], list[int]]) -> list[Excerpt]:
    return [(f"row {row}", read(row)) for row in evenly_spaced(num_rows, options.num_samples)]
