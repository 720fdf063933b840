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
from trainyard.data.wikipedia.wikitext import WikiNamespaces

READ_BYTES = 1 << 20
"""Bytes of a file at a time."""
MAX_HEADER_BYTES = 1 << 20
"""The XML before the first page is shorter."""
MAX_PAGE_BYTES = 64 << 20
"""No page has so many bytes; a page with all its old versions may."""
MAX_STREAM_BYTES = 4 << 20
"""Compressed bytes of a stream that are taken at once. A longer one is unpacked bit by bit."""
UNPACK_BYTES = 16 << 20
"""Bytes that are unpacked at once."""
STREAM_START = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")
"""How a bz2 stream begins: with its first block, or with its end if it has none."""
STREAM_START_BYTES = 10
PAGE_END = b"</page>"
DUMP_END = b"</mediawiki>"
HIDDEN_NAMESPACE_KEYS = ("6", "14")
"""Namespaces of files and of categories."""
DECOMPRESSION_ERRORS = (OSError, EOFError, zlib.error)
"""What unpacking raises."""


class DumpPosition(NamedTuple):
    """Where a batch ends."""

    file_index: int = 0
    stream_offset: int = 0
    """Byte of the file from which it can be unpacked: a bz2 stream begins there."""
    stream_xml_offset: int = 0
    """Bytes of XML before that."""
    xml_offset: int = 0
    """Bytes of XML before the next page."""


@dataclass(frozen=True)
class WikiDump:
    """A file, and what it says of its wiki."""

    path: Path
    base_url: str
    """Addresses of pages begin with it."""
    namespaces: WikiNamespaces


class PageBatch(NamedTuple):
    file_index: int
    xml_offset: int
    """Byte of the XML at which it begins."""
    xml: bytes
    next_position: DumpPosition
    file_bytes_read: int
    """Bytes of the file, as it is on disk, that were read up to here."""
    error: str = ""
    """Why nothing of this file can be read after this batch."""


class XmlPart(NamedTuple):
    """XML, one part after the other."""

    stream_offset: int
    stream_xml_offset: int
    """As in Place: the last point before this part from which one can unpack."""
    xml: bytes
    file_bytes_read: int
    """As in Batch."""


def open_dump(path: Path) -> WikiDump:
    """A dump by its head. A file that is none is found here."""
    head = b""
    try:
        for part in read_xml(path, DumpPosition(), 0):
            head += part.xml
            if b"<page>" in head or len(head) > MAX_HEADER_BYTES:
                break
    except DECOMPRESSION_ERRORS as error:
        if b"<mediawiki" not in head:
            raise UserError(f"{path}: cannot be read: {_reason(error)}") from None
    head = head[:MAX_HEADER_BYTES].partition(b"<page>")[0]
    if b"<mediawiki" not in head:
        raise UserError(
            f"{path}: no MediaWiki dump (<mediawiki> is not at its beginning); wanted: XML, or .bz2 or .gz of it"
        )
    begin, end = head.find(b"<siteinfo>"), head.find(b"</siteinfo>")
    if min(begin, end) < 0:
        return WikiDump(path, "", WikiNamespaces())
    try:
        info = ElementTree.fromstring(head[begin : end + len(b"</siteinfo>")])
    except ElementTree.ParseError as error:
        raise UserError(f"{path}: its <siteinfo> is not XML: {error}") from None
    hidden = [element.text for element in info.iter("namespace") if element.get("key") in HIDDEN_NAMESPACE_KEYS]
    base = (info.findtext("base") or "").rpartition("/")[0]
    return WikiDump(path, base, WikiNamespaces(frozenset(name.lower() for name in hidden if name)))


def page_batches(path: Path, begin: DumpPosition, size: int, threads: int) -> Iterator[PageBatch]:
    """Whole pages, at least `size` bytes of XML at a time but for the last. A file that breaks off says so there."""
    anchors = deque([(begin.stream_offset, begin.stream_xml_offset)])
    buffer, start, searched = bytearray(), begin.xml_offset, 0
    total, read, broken = begin.stream_xml_offset, 0, ""
    try:
        for part in read_xml(path, begin, threads):
            skipped = max(begin.xml_offset - total, 0)  # up to where reading had stopped
            total, read = total + len(part.xml), part.file_bytes_read
            anchors.append((part.stream_offset, part.stream_xml_offset))
            buffer += part.xml[skipped:]
            while (found := buffer.find(PAGE_END, max(size - len(PAGE_END), searched))) >= 0:
                stop = found + len(PAGE_END)
                while len(anchors) > 1 and anchors[1][1] <= start + stop:
                    anchors.popleft()
                after = DumpPosition(begin.file_index, *anchors[0], start + stop)
                yield PageBatch(begin.file_index, start, bytes(buffer[:stop]), after, read)
                del buffer[:stop]
                start, searched = start + stop, 0
            searched = max(len(buffer) - len(PAGE_END), 0)
            if len(buffer) > size + MAX_PAGE_BYTES:
                at = start + max(buffer.rfind(b"<page>"), 0)
                broken = (
                    f"byte {at} of its XML: a page of more than {MAX_PAGE_BYTES >> 20} MiB (with all its old versions?)"
                )
                break
    except DECOMPRESSION_ERRORS as error:
        broken = f"breaks off after byte {total} of its XML: {_reason(error)}"
    stop = buffer.rfind(PAGE_END) + len(PAGE_END) if PAGE_END in buffer else 0
    if not broken and DUMP_END not in buffer[stop:]:
        broken = "ends before </mediawiki> (truncated?)"
    yield PageBatch(
        begin.file_index,
        start,
        bytes(buffer[:stop] if broken else buffer),
        DumpPosition(begin.file_index + 1),
        read,
        broken,
    )


def read_xml(path: Path, begin: DumpPosition, threads: int) -> Iterator[XmlPart]:
    """The XML from `begin.unpacked` on. What kind of file it is, its first bytes say, not its name."""
    with path.open("rb") as file:
        first = file.read(3)
        file.seek(begin.stream_offset)
        if first == b"BZh":
            yield from _bz2(file, begin, threads)
        elif first[:2] == b"\x1f\x8b":
            yield from _gzip(file)
        else:
            at = begin.stream_offset
            while block := file.read(READ_BYTES):
                yield XmlPart(at, at, block, at + len(block))
                at += len(block)


def _gzip(file: BinaryIO) -> Iterator[XmlPart]:
    with gzip.GzipFile(fileobj=file) as unpacked:
        while block := unpacked.read1(READ_BYTES):
            yield XmlPart(0, 0, block, file.tell())


def _bz2(file: BinaryIO, begin: DumpPosition, threads: int) -> Iterator[XmlPart]:
    packed, total = begin.stream_offset, begin.stream_xml_offset
    unpacked = total
    stream: bz2.BZ2Decompressor | None = None
    for at, data, ahead in _decompress_ahead(_split_streams(file), threads):
        if stream is None or stream.eof:
            stream, xml = ahead.result() if ahead else _begin_stream(data)
            packed, unpacked = at, total
        else:
            # The middle of a long stream; or bytes that look like the beginning of one by chance.
            xml = stream.decompress(data, UNPACK_BYTES)
        while True:
            total += len(xml)
            yield XmlPart(packed, unpacked, xml, at + len(data))
            if stream.eof or stream.needs_input:
                break
            xml = stream.decompress(b"", UNPACK_BYTES)
        if stream.eof and stream.unused_data:
            raise OSError(
                f"byte {at + len(data) - len(stream.unused_data)} of the file: a bz2 stream should begin there"
            )
    if stream and not stream.eof:
        raise EOFError("the file ends in the middle of a bz2 stream (truncated?)")


def _begin_stream(data: bytes) -> tuple[bz2.BZ2Decompressor, bytes]:
    stream = bz2.BZ2Decompressor()
    return stream, stream.decompress(data, UNPACK_BYTES)


def _split_streams(file: BinaryIO) -> Iterator[tuple[int, bool, bytes]]:
    """Where a piece begins, whether it looks like the beginning of a stream, and the piece: a stream, or LONG of it."""
    at, begins, buffer, searched = file.tell(), True, b"", 1
    while block := file.read(READ_BYTES):
        buffer += block
        start = 0
        for match in STREAM_START.finditer(buffer, searched):
            if match.start() > start:
                yield at + start, begins, buffer[start : match.start()]
            start, begins = match.start(), True
        at, buffer = at + start, buffer[start:]
        searched = max(len(buffer) - STREAM_START_BYTES + 1, 1)
        if len(buffer) > MAX_STREAM_BYTES:
            yield at, begins, buffer[:-STREAM_START_BYTES]
            at, begins, buffer, searched = at + len(buffer) - STREAM_START_BYTES, False, buffer[-STREAM_START_BYTES:], 0
    if buffer:
        yield at, begins, buffer


def _decompress_ahead(
    pieces: Iterator[tuple[int, bool, bytes]], threads: int
) -> Iterator[tuple[int, bytes, "Future[tuple[bz2.BZ2Decompressor, bytes]] | None"]]:
    """The same in order, with streams already unpacked by threads (which unpack in parallel: bz2 frees the lock)."""
    if not threads:
        yield from ((at, data, None) for at, _, data in pieces)
        return
    coming: deque[tuple[int, bytes, Future[tuple[bz2.BZ2Decompressor, bytes]] | None]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for at, begins, data in pieces:
            coming.append((at, data, pool.submit(_begin_stream, data) if begins else None))
            if len(coming) > 2 * threads:
                yield coming.popleft()
        yield from coming


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
