"""The tokens of a remote file as an array that is read where it is sliced."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.remote.chunks.cached_file import CachedFile, Positions

Rows = NDArray[np.int32]


class RemoteTokens:
    """Tokens `start` to `stop` of a file: slices are arrays, ranges are views like this one."""

    def __init__(self, file: CachedFile, dtype: np.dtype[Any], start: int, stop: int) -> None:
        self.file, self.dtype, self.start, self.stop = file, dtype, start, stop
        self.chunk_tokens = file.chunk_bytes // dtype.itemsize
        self.nbytes = (stop - start) * dtype.itemsize

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, selected: slice) -> NDArray[Any]:
        first, last, step = selected.indices(len(self))
        assert step == 1
        itemsize = self.dtype.itemsize
        content = self.file.read((self.start + first) * itemsize, (self.start + max(last, first)) * itemsize)
        return content.view(self.dtype)

    def span(self, start: int, stop: int) -> "RemoteTokens":
        return RemoteTokens(self.file, self.dtype, self.start + start, self.start + stop)

    def fetch(self, starts: Positions, lengths: Positions, wait: bool = False) -> None:
        """Fetch the tokens at these positions in the background, or now."""
        first = (starts + self.start) * self.dtype.itemsize
        self.file.fetch(first, first + lengths * self.dtype.itemsize, wait)

    def array(self) -> NDArray[Any] | None:
        """The tokens, if they are all on this host."""
        content = self.file.content()
        itemsize = self.dtype.itemsize
        return None if content is None else content[self.start * itemsize : self.stop * itemsize].view(self.dtype)

    def fill(self, rows: Rows, starts: Positions, lengths: Positions) -> None:
        """Copy `lengths` tokens from `starts` on to the beginning of each row."""
        first = starts + self.start
        numbers, offsets = np.divmod(first, self.chunk_tokens)
        itemsize = self.dtype.itemsize
        contents = self.file.chunks(self.file.chunk_numbers(first * itemsize, (first + lengths) * itemsize))
        chunks = {number: content.view(self.dtype) for number, content in contents.items()}
        places = zip(rows, numbers.tolist(), offsets.tolist(), (offsets + lengths).tolist(), strict=True)
        for row, number, offset, end in places:
            tokens = chunks[number][offset:end]
            count = len(tokens)
            row[:count] = tokens
            while offset + count < end:  # the rest is in the next chunks
                number += 1
                tokens = chunks[number][: end - offset - count]
                row[count : count + len(tokens)] = tokens
                count += len(tokens)
