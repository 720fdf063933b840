"""The bytes of MediaWiki dumps, unpacked and cut into batches of whole pages.

A dump is one XML file of up to 100 GB, mostly as bz2: either one stream, which only one core can unpack, or
"multistream", many streams one after the other, which threads unpack ahead. Nothing is ever held but a few batches.
A batch ends with the first page that ends beyond its size: where batches lie does not depend on how the file was read,
so that reading may stop after any of them and go on from there.
"""

import bz2
import gzip
import re
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple
from xml.etree import ElementTree

from trainyard.core.errors import UserError
from trainyard.data.wikipedia.wikitext import Names

READ = 1 << 20
"""Bytes of a file at a time."""
HEAD = 1 << 20
"""The XML before the first page is shorter."""
LARGEST = 64 << 20
"""No page has so many bytes; a page with all its old versions may."""
LONG = 4 << 20
"""Compressed bytes of a stream that are taken at once. A longer one is unpacked bit by bit."""
UNPACK = 16 << 20
"""Bytes that are unpacked at once."""
STREAM = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")
"""How a bz2 stream begins: with its first block, or with its end if it has none."""
STREAM_LENGTH = 10
PAGE_END = b"</page>"
END = b"</mediawiki>"
HIDDEN = ("6", "14")
"""Namespaces of files and of categories."""
BROKEN = (OSError, EOFError, zlib.error)
"""What unpacking raises."""


class Place(NamedTuple):
    """Where a batch ends."""

    file: int = 0
    packed: int = 0
    """Byte of the file from which it can be unpacked: a bz2 stream begins there."""
    unpacked: int = 0
    """Bytes of XML before that."""
    page: int = 0
    """Bytes of XML before the next page."""


@dataclass(frozen=True)
class Dump:
    """A file, and what it says of its wiki."""

    path: Path
    base: str
    """Addresses of pages begin with it."""
    names: Names


class Batch(NamedTuple):
    file: int
    start: int
    """Byte of the XML at which it begins."""
    xml: bytes
    after: Place
    read: int
    """Bytes of the file, as it is on disk, that were read up to here."""
    broken: str = ""
    """Why nothing of this file can be read after this batch."""


class Part(NamedTuple):
    """XML, one part after the other."""

    packed: int
    unpacked: int
    """As in Place: the last point before this part from which one can unpack."""
    xml: bytes
    read: int
    """As in Batch."""


def open_dump(path: Path) -> Dump:
    """A dump by its head. A file that is none is found here."""
    head = b""
    try:
        for part in unpack(path, Place(), 0):
            head += part.xml
            if b"<page>" in head or len(head) > HEAD:
                break
    except BROKEN as error:
        if b"<mediawiki" not in head:
            raise UserError(f"{path}: cannot be read: {_reason(error)}") from None
    head = head[:HEAD].partition(b"<page>")[0]
    if b"<mediawiki" not in head:
        raise UserError(
            f"{path}: no MediaWiki dump (<mediawiki> is not at its beginning); wanted: XML, or .bz2 or .gz of it"
        )
    begin, end = head.find(b"<siteinfo>"), head.find(b"</siteinfo>")
    if min(begin, end) < 0:
        return Dump(path, "", Names())
    try:
        info = ElementTree.fromstring(head[begin : end + len(b"</siteinfo>")])
    except ElementTree.ParseError as error:
        raise UserError(f"{path}: its <siteinfo> is not XML: {error}") from None
    hidden = [element.text for element in info.iter("namespace") if element.get("key") in HIDDEN]
    base = (info.findtext("base") or "").rpartition("/")[0]
    return Dump(path, base, Names(frozenset(name.lower() for name in hidden if name)))


def batches(path: Path, begin: Place, size: int, threads: int) -> Iterator[Batch]:
    """Whole pages, at least `size` bytes of XML at a time but for the last. A file that breaks off says so there."""
    anchors = deque([(begin.packed, begin.unpacked)])
    buffer, start, searched = bytearray(), begin.page, 0
    total, read, broken = begin.unpacked, 0, ""
    try:
        for part in unpack(path, begin, threads):
            skipped = max(begin.page - total, 0)  # up to where reading had stopped
            total, read = total + len(part.xml), part.read
            anchors.append((part.packed, part.unpacked))
            buffer += part.xml[skipped:]
            while (found := buffer.find(PAGE_END, max(size - len(PAGE_END), searched))) >= 0:
                stop = found + len(PAGE_END)
                while len(anchors) > 1 and anchors[1][1] <= start + stop:
                    anchors.popleft()
                after = Place(begin.file, *anchors[0], start + stop)
                yield Batch(begin.file, start, bytes(buffer[:stop]), after, read)
                del buffer[:stop]
                start, searched = start + stop, 0
            searched = max(len(buffer) - len(PAGE_END), 0)
            if len(buffer) > size + LARGEST:
                at = start + max(buffer.rfind(b"<page>"), 0)
                broken = f"byte {at} of its XML: a page of more than {LARGEST >> 20} MiB (with all its old versions?)"
                break
    except BROKEN as error:
        broken = f"breaks off after byte {total} of its XML: {_reason(error)}"
    stop = buffer.rfind(PAGE_END) + len(PAGE_END) if PAGE_END in buffer else 0
    if not broken and END not in buffer[stop:]:
        broken = "ends before </mediawiki> (truncated?)"
    yield Batch(begin.file, start, bytes(buffer[:stop] if broken else buffer), Place(begin.file + 1), read, broken)


def unpack(path: Path, begin: Place, threads: int) -> Iterator[Part]:
    """The XML from `begin.unpacked` on. What kind of file it is, its first bytes say, not its name."""
    with path.open("rb") as file:
        first = file.read(3)
        file.seek(begin.packed)
        if first == b"BZh":
            yield from _bz2(file, begin, threads)
        elif first[:2] == b"\x1f\x8b":
            yield from _gzip(file)
        else:
            at = begin.packed
            while block := file.read(READ):
                yield Part(at, at, block, at + len(block))
                at += len(block)


def _gzip(file: BinaryIO) -> Iterator[Part]:
    with gzip.GzipFile(fileobj=file) as unpacked:
        while block := unpacked.read1(READ):
            yield Part(0, 0, block, file.tell())


def _bz2(file: BinaryIO, begin: Place, threads: int) -> Iterator[Part]:
    packed, total = begin.packed, begin.unpacked
    unpacked = total
    stream: bz2.BZ2Decompressor | None = None
    for at, data, ahead in _ahead(_pieces(file), threads):
        if stream is None or stream.eof:
            stream, xml = ahead.result() if ahead else _first(data)
            packed, unpacked = at, total
        else:
            # The middle of a long stream; or bytes that look like the beginning of one by chance.
            xml = stream.decompress(data, UNPACK)
        while True:
            total += len(xml)
            yield Part(packed, unpacked, xml, at + len(data))
            if stream.eof or stream.needs_input:
                break
            xml = stream.decompress(b"", UNPACK)
        if stream.eof and stream.unused_data:
            raise OSError(
                f"byte {at + len(data) - len(stream.unused_data)} of the file: a bz2 stream should begin there"
            )
    if stream and not stream.eof:
        raise EOFError("the file ends in the middle of a bz2 stream (truncated?)")


def _first(data: bytes) -> tuple[bz2.BZ2Decompressor, bytes]:
    stream = bz2.BZ2Decompressor()
    return stream, stream.decompress(data, UNPACK)


def _pieces(file: BinaryIO) -> Iterator[tuple[int, bool, bytes]]:
    """Where a piece begins, whether it looks like the beginning of a stream, and the piece: a stream, or LONG of it."""
    at, begins, buffer, searched = file.tell(), True, b"", 1
    while block := file.read(READ):
        buffer += block
        start = 0
        for match in STREAM.finditer(buffer, searched):
            if match.start() > start:
                yield at + start, begins, buffer[start : match.start()]
            start, begins = match.start(), True
        at, buffer = at + start, buffer[start:]
        searched = max(len(buffer) - STREAM_LENGTH + 1, 1)
        if len(buffer) > LONG:
            yield at, begins, buffer[:-STREAM_LENGTH]
            at, begins, buffer, searched = at + len(buffer) - STREAM_LENGTH, False, buffer[-STREAM_LENGTH:], 0
    if buffer:
        yield at, begins, buffer


def _ahead(
    pieces: Iterator[tuple[int, bool, bytes]], threads: int
) -> Iterator[tuple[int, bytes, "Future[tuple[bz2.BZ2Decompressor, bytes]] | None"]]:
    """The same in order, with streams already unpacked by threads (which unpack in parallel: bz2 frees the lock)."""
    if not threads:
        yield from ((at, data, None) for at, _, data in pieces)
        return
    coming: deque[tuple[int, bytes, Future[tuple[bz2.BZ2Decompressor, bytes]] | None]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for at, begins, data in pieces:
            coming.append((at, data, pool.submit(_first, data) if begins else None))
            if len(coming) > 2 * threads:
                yield coming.popleft()
        yield from coming


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
