"""Fingerprints of the files that a run reads, saved with its checkpoints to notice changed data on resume."""

import zlib
from concurrent.futures import ThreadPoolExecutor

from trainyard.config.data_schema import DataSection
from trainyard.data.loading.data_files import files_read
from trainyard.remote.chunks.remote_path import DataPath, RemotePath

BLOCK_BYTES = 1 << 16
MAX_BLOCKS = 64
"""Blocks that are read of a file, evenly spaced with the first and the last; a file of up to 4 MiB is read in full."""

Fingerprint = list[int | str]
Fingerprints = dict[str, Fingerprint]
"""Size of each file, by path or URL, and CRC-32 of some of its blocks, or the version (ETag) of an object."""


def fingerprint_files(data: DataSection, read_blocks: bool = False, refresh: bool = False) -> Fingerprints:
    """The fingerprints of every file that decides about the samples. `read_blocks`: those of objects are CRC-32 of
    blocks, too, to compare them with files. `refresh`: of objects as they are now, not as the run reads them."""

    def fingerprint(path: DataPath) -> Fingerprint:
        if isinstance(path, RemotePath) and not read_blocks:
            stored = path.source().stored
            return [stored.size, stored.version]
        return fingerprint_file(path)

    files = files_read(data, refresh)
    with ThreadPoolExecutor(16) as threads:  # a network file system answers many requests at a time
        return dict(zip(map(str, files), threads.map(fingerprint, files), strict=True))


def fingerprint_file(path: DataPath) -> Fingerprint:
    """Its size, and CRC-32 of some of its blocks."""
    size = path.stat().st_size
    num_blocks = min(-(-size // BLOCK_BYTES), MAX_BLOCKS)
    checksum = 0
    with path.open("rb") if isinstance(path, RemotePath) else path.open("rb", buffering=0) as file:
        for block in range(num_blocks):
            last = max(num_blocks - 1, 1)
            file.seek(max(size - BLOCK_BYTES, 0) * block // last if num_blocks == MAX_BLOCKS else block * BLOCK_BYTES)
            checksum = zlib.crc32(file.read(BLOCK_BYTES), checksum)
    return [size, checksum]
