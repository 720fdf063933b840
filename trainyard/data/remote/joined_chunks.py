"""One array over the files of consecutive chunks: reading it costs what reading a mapped local file does."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainyard.data.remote.chunk_cache import Bytes

MAP_FIXED = 0x10
"""The same on Linux and macOS; Python's mmap does not take an address."""
ALIGNMENT = 2 << 20
"""Of large files that the kernel maps itself: without it, reads take a few percent longer."""
MAP_FAILED = ctypes.c_void_p(-1).value


def join_chunks(paths: Sequence[Path], chunk_bytes: int, size: int) -> Bytes | None:
    """An array of `size` bytes over files of `chunk_bytes` (a multiple of the page size), the last one shorter; None if
    one is gone. The files stay mapped as long as the array or a view of it exists."""
    mmap_at = ctypes.CDLL(None, use_errno=True).mmap
    mmap_at.restype = ctypes.c_void_p
    mmap_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    # The reservation owns its addresses: what is mapped over them ends with it.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reservation = np.frombuffer(mmap.mmap(-1, size + ALIGNMENT, flags=flags, prot=mmap.PROT_READ), np.uint8)
    offset = -reservation.ctypes.data % ALIGNMENT
    content = reservation[offset : offset + size]
    for number, path in enumerate(paths):
        start = number * chunk_bytes
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        length = min(chunk_bytes, size - start)
        place = content.ctypes.data + start
        address = mmap_at(place, length, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, descriptor, 0)
        os.close(descriptor)
        if address == MAP_FAILED:
            return None
    return content
