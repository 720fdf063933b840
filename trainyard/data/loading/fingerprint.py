"""Fingerprints of the files that a run reads, saved with its checkpoints to notice changed data on resume."""

import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainyard.config.data_schema import DataSection
from trainyard.core.user_code import is_user_path
from trainyard.data.formats.documents import arrow_files, match_paths
from trainyard.data.loading.build import match_files, token_prefixes
from trainyard.data.text.tokenizer import TOKENIZER_FILES

BLOCK_BYTES = 1 << 16
MAX_BLOCKS = 64
"""Blocks that are read of a file, evenly spaced with the first and the last; a file of up to 4 MiB is read in full."""

Fingerprints = dict[str, list[int]]
"""Size and CRC-32 of some blocks of each file, by path."""


def fingerprint_files(data: DataSection) -> Fingerprints:
    files = _files_read(data)
    with ThreadPoolExecutor(16) as threads:  # a network file system answers many requests at a time
        return dict(zip(map(str, files), threads.map(_fingerprint, files), strict=True))


def _files_read(data: DataSection) -> list[Path]:
    """Every file that decides about the samples."""
    if data.source == "synthetic":
        return []
    if is_user_path(data.source):  # its paths need not be files
        return [path for pattern in data.paths for path in match_paths(pattern) if path.is_file()]
    if data.source == "tokens":
        return [Path(f"{prefix}{suffix}") for prefix in token_prefixes(data.paths) for suffix in (".bin", ".idx")]
    paths = match_files(data.paths, directories=data.source != "hdf5")
    files = [file for path in paths for file in (arrow_files(path) if path.is_dir() else [path])]
    return files + (_tokenizer_files(data) if data.source == "text" else [])


def _tokenizer_files(data: DataSection) -> list[Path]:
    named = [Path(name).expanduser() for name in (data.tokenizer, data.vocab_file, data.merges_file) if name]
    in_directories = [path / name for path in named for name in TOKENIZER_FILES]
    return [path for path in named + in_directories if path.is_file()]


def _fingerprint(path: Path) -> list[int]:
    size = path.stat().st_size
    num_blocks = min(-(-size // BLOCK_BYTES), MAX_BLOCKS)
    checksum = 0
    with path.open("rb", buffering=0) as file:
        for block in range(num_blocks):
            last = max(num_blocks - 1, 1)
            file.seek(max(size - BLOCK_BYTES, 0) * block // last if num_blocks == MAX_BLOCKS else block * BLOCK_BYTES)
            checksum = zlib.crc32(file.read(BLOCK_BYTES), checksum)
    return [size, checksum]
