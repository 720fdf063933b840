"""What is in a file: counts, lengths, samples, and whether all of it holds.

Each kind of file has a function that fills a Report. Everything is read in stretches, so that memory stays small; with
`check`, every number in the file is looked at, and the first that cannot be right ends the work with its place.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.core.errors import UserError, one_line
from trainyard.data.formats import documents
from trainyard.data.formats.arrow_dataset import (
    INFO_FILE,
    SPLITS_FILE,
    STATE_FILE,
    data_files,
    list_column,
    open_stream,
)
from trainyard.data.formats.documents import UnreadableRecord
from trainyard.data.formats.megatron_bin import MegatronTokens, prefix_of
from trainyard.data.loading.token_samples import IGNORE_INDEX
from trainyard.data.prepare.length_stats import InspectOptions, InspectReport, LengthStats, check_range, evenly_spaced

ELEMENTS_PER_READ = 1 << 22
"""Numbers looked at together."""
SAMPLE_TOKENS = 48
"""Tokens shown of a sample."""
SAMPLE_CHARACTERS = 200
"""Characters shown of one, where it is text."""
DOCUMENT_KINDS = {
    ".txt": "text",
    ".parquet": "Parquet",
    **dict.fromkeys((".json", ".jsonl", ".gz", ".zst"), "JSON lines"),
}
MAX_COMPRESSION_RATIO = 1100
"""Times smaller than its numbers a compressed file can be, at most."""
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"

OnProgress = Callable[[int, int], None]
"""Told the bytes that were read, and all there are."""


def inspect_path(path: Path, wanted: InspectOptions, show: OnProgress) -> InspectReport:
    path = path.expanduser()
    prefix = prefix_of(path)
    if path.suffix in (".bin", ".idx") or (not path.is_file() and Path(f"{prefix}.idx").is_file()):
        return _inspect_megatron(prefix, wanted, show)
    if path.is_dir():
        if any((path / name).is_file() for name in (STATE_FILE, INFO_FILE, SPLITS_FILE)):
            return _inspect_arrow(path, wanted, show)
    elif not path.is_file():
        raise UserError(f"{path}: no such file")
    else:
        with path.open("rb") as file:
            if file.read(len(HDF5_MAGIC)) == HDF5_MAGIC:
                return _inspect_hdf5(path, wanted, show)
    return _inspect_documents(path, wanted, show)


def _inspect_megatron(prefix: Path, wanted: InspectOptions, show: OnProgress) -> InspectReport:
    data = MegatronTokens(prefix)
    files = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]
    documents_ = max(len(data.document_bounds) - 1, 0)
    report = InspectReport(str(prefix), "token files (.bin and .idx)")
    by_document, by_sequence = LengthStats(), LengthStats()
    empty = 0
    for start in range(0, documents_, ELEMENTS_PER_READ):
        bounds = data.document_bounds[start : start + ELEMENTS_PER_READ + 1]
        sizes = data.sequence_lengths[bounds[0] : bounds[-1]]
        ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)))
        lengths = np.diff(ends[bounds - bounds[0]])
        by_document.add(lengths)
        by_sequence.add(sizes)
        empty += int((lengths == 0).sum())
    total = int(data.sequence_lengths.sum(dtype=np.int64))
    report.facts = {
        "dtype": data.dtype.name,
        "documents": documents_,
        "empty documents": empty,
        "sequences": len(data),
        "tokens": total,
        "bytes": sum(file.stat().st_size for file in files),
        "contiguous": data.contiguous,
    }
    report.lengths["tokens of a document"] = by_document.summary()
    if by_sequence.counts != by_document.counts:
        report.lengths["tokens of a sequence"] = by_sequence.summary()
    for number in evenly_spaced(documents_, wanted.num_samples):
        first, last = data.document_bounds[number : number + 2].tolist()
        tokens: list[int] = []
        while first < last and len(tokens) < SAMPLE_TOKENS:
            tokens += data.sequence(first)[: SAMPLE_TOKENS - len(tokens)].tolist()
            first += 1
        report.samples.append((f"document {number}", tokens))
    if wanted.check:
        report.facts |= _check_tokens(data, wanted, show)
    return report


def _check_tokens(data: MegatronTokens, wanted: InspectOptions, show: OnProgress) -> dict[str, Any]:
    if not data.contiguous:
        ends = np.cumsum(data.sequence_lengths, dtype=np.int64)
        wrong = np.flatnonzero(data.sequence_starts != ends - data.sequence_lengths)
        what = (
            f"sequence {wrong[0]} does not begin where the one before ends" if len(wrong) else "tokens after the last"
        )
        raise UserError(f"{data.prefix}.idx: {what}; the files are not of one set, or were damaged")
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(data.sequence_lengths, dtype=np.int64)))
    lasts = np.unique(ends[data.document_bounds])[1:] - 1
    found: dict[int, int] = {}
    for start in range(0, len(data.tokens), ELEMENTS_PER_READ):
        tokens = data.tokens[start : start + ELEMENTS_PER_READ]
        check_range(f"{data.prefix}.bin", tokens, start, wanted.vocab_size or 2**31)
        here = lasts[slice(*np.searchsorted(lasts, (start, start + len(tokens))))] - start
        for token, count in zip(*(each.tolist() for each in np.unique(tokens[here], return_counts=True)), strict=True):
            found[token] = found.get(token, 0) + count
        show((start + len(tokens)) * data.dtype.itemsize, data.tokens.nbytes)
    end = wanted.end_token if wanted.end_token is not None else max(found, key=lambda token: found[token], default=0)
    return {"checked": "all tokens", "end token": end, "documents that end with it": found.get(end, 0)}


def _inspect_arrow(directory: Path, wanted: InspectOptions, show: OnProgress) -> InspectReport:
    files = data_files(directory)
    schema = open_stream(files[0]).schema if files else None
    if schema and "input_ids" not in schema.names:
        return _inspect_documents(directory, wanted, show)
    size = sum(file.stat().st_size for file in directory.iterdir())
    lengths, limit = LengthStats(), wanted.vocab_size or 2**31
    rows = tokens = pieces = ignored = done = 0
    for file in files:
        for batch in open_stream(file).batches:
            ends, values = list_column(file, batch, "input_ids")
            lengths.add(np.diff(ends))
            if wanted.check:
                check_range(str(file), values[ends[0] : ends[-1]], tokens, limit)
                more = _check_columns(file, batch, np.diff(ends), tokens, limit)
                ignored, pieces = ignored + more[0], pieces + more[1]
                done += batch.nbytes
                show(done, size)
            rows += batch.num_rows
            tokens += int(ends[-1] - ends[0])
    report = InspectReport(str(directory), "Arrow data set (save_to_disk)")
    report.facts = {
        "columns": {name: str(kind) for name, kind in zip(schema.names, schema.types, strict=True)} if schema else {},
        "files": len(files),
        "sequences": rows,
        "tokens": tokens,
        "bytes": size,
    }
    if wanted.check:
        report.facts |= {"checked": "all rows", "labels that count nowhere": ignored}
        if schema and "position_ids" in schema.names:
            report.facts["pieces of documents"] = pieces
    report.lengths["tokens of a sequence"] = lengths.summary()
    report.samples = [
        (f"row {number}", _arrow_sample(files, number)) for number in evenly_spaced(rows, wanted.num_samples)
    ]
    return report


def _check_columns(file: Path, batch: Any, lengths: NDArray[np.int64], first: int, limit: int) -> tuple[int, int]:
    """How many labels count nowhere, and into how many pieces position_ids part the rows."""
    ignored = pieces = 0
    for name in ("attention_mask", "labels", "position_ids"):
        if name not in batch.schema.names:
            continue
        ends, values = list_column(file, batch, name)
        if not np.array_equal(np.diff(ends), lengths):
            raise UserError(f"{file}: a row of {name!r} is not as long as its input_ids")
        values = values[ends[0] : ends[-1]]
        if name == "attention_mask":
            check_range(str(file), values, first, 2, "attention_mask")
        elif name == "labels":
            ignored = int(np.count_nonzero(values == IGNORE_INDEX))
            check_range(str(file), np.where(values == IGNORE_INDEX, 0, values), first, limit, "label")
        elif len(values):
            check_range(str(file), values, first, 2**31, "position")
            begins = np.append(True, values[1:] != values[:-1] + 1)
            begins[(ends[:-1] - ends[0])[lengths > 0]] = True
            pieces = int(np.count_nonzero(begins))
    return ignored, pieces


def _arrow_sample(files: list[Path], number: int) -> list[int]:
    for file in files:
        for batch in open_stream(file).batches:
            if number < batch.num_rows:
                ends, values = list_column(file, batch, "input_ids")
                return values[ends[number] : ends[number + 1]][:SAMPLE_TOKENS].tolist()
            number -= batch.num_rows
    raise AssertionError(number)


def _inspect_documents(path: Path, wanted: InspectOptions, show: OnProgress) -> InspectReport:
    lengths, size = LengthStats(), documents.total_bytes([path])
    found = empty = characters = bad = done = 0
    report = InspectReport(str(path), f"documents ({DOCUMENT_KINDS.get(path.suffix, path.suffix or 'a directory')})")
    for piece in documents.input_slices([path]):
        counts: list[int] = []
        for each in documents.read_documents(piece, [wanted.text_key]):
            if isinstance(each, UnreadableRecord):
                if wanted.check:
                    raise UserError(f"{each.path}: {each.location}: {each.reason}")
                bad += 1
                continue
            if found + len(counts) < wanted.num_samples:
                report.samples.append((f"document {found + len(counts)}", each[0][:SAMPLE_CHARACTERS]))
            counts.append(len(each[0]))
        lengths.add(np.array(counts, np.int64))
        found, characters, empty = found + len(counts), characters + sum(counts), empty + counts.count(0)
        done += piece.input_bytes
        show(done, size)
    report.facts = {
        "documents": found,
        "empty documents": empty,
        "malformed": bad,
        "characters": characters,
        "bytes": size,
    }
    if wanted.check:
        report.facts["checked"] = "all documents"
    report.lengths["characters of a document"] = lengths.summary()
    return report


def _inspect_hdf5(path: Path, wanted: InspectOptions, show: OnProgress) -> InspectReport:
    import h5py

    try:
        with h5py.File(path, "r") as file:
            return _inspect_bert_pairs(path, file, wanted, show)
    except UserError:
        raise
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not an HDF5 file that can be read: {one_line(error)}") from None


def _inspect_bert_pairs(path: Path, file: Any, wanted: InspectOptions, show: OnProgress) -> InspectReport:
    """Rows of BERT's input: padded pairs of sentences."""
    sets = {name: file[name] for name in file}
    report = InspectReport(str(path), "HDF5 (BERT)")
    ids = sets.get("input_ids")
    if ids is None or len(getattr(ids, "shape", ())) != 2:
        raise UserError(f"{path}: no rows of 'input_ids' in it; has: {', '.join(sets) or 'nothing'}")
    rows, width = ids.shape
    for name, each in sets.items():
        if not getattr(each, "shape", ()) or each.shape[0] != rows or each.dtype.kind not in "iu":
            raise UserError(f"{path}: {name!r} is not {rows} rows of whole numbers, as 'input_ids' is")
        if name in ("input_mask", "segment_ids") and each.shape != ids.shape:
            raise UserError(f"{path}: {name!r} is {list(each.shape)}, but 'input_ids' {list(ids.shape)}")
        if each.nbytes > MAX_COMPRESSION_RATIO * path.stat().st_size:
            raise UserError(f"{path}: {name!r} says {list(each.shape)}, more than the file can hold; it is damaged")
    report.facts = {
        "columns": {name: f"{each.dtype} {list(each.shape)}" for name, each in sets.items()},
        "sequences": rows,
        "tokens": 0,
        "bytes": path.stat().st_size,
    }
    limits = {"input_mask": 2, "segment_ids": 2, "masked_lm_positions": width, "next_sentence_labels": 2}
    lengths = LengthStats()
    step = max(ELEMENTS_PER_READ // max(width, 1), 1)
    for start in range(0, rows, step):
        here = slice(start, start + step)
        count = min(step, rows - start)
        used = np.count_nonzero(sets["input_mask"][here], axis=1) if "input_mask" in sets else np.full(count, width)
        lengths.add(used)
        report.facts["tokens"] += int(used.sum())
        for name, each in sets.items() if wanted.check else ():
            first = start * (each.shape[1] if len(each.shape) > 1 else 1)
            check_range(str(path), each[here].reshape(-1), first, limits.get(name, wanted.vocab_size or 2**31), name)
        show(report.facts["bytes"] * (start + count) // rows, report.facts["bytes"])
    if wanted.check:
        report.facts["checked"] = "all rows"
    report.lengths["tokens of a sequence"] = lengths.summary()
    report.samples = [
        (f"row {number}", ids[number][:SAMPLE_TOKENS].tolist()) for number in evenly_spaced(rows, wanted.num_samples)
    ]
    return report
