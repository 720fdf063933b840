"""MediaWiki dumps: decompressed and cut into batches of whole pages.

A dump is one XML file of up to 100 GB, usually bz2: either one stream, which only one core can decompress, or
"multistream", many streams one after the other, which threads decompress ahead. Only a few batches are in memory. A
batch ends with the first page that ends beyond the batch size, so batch boundaries do not depend on how the file was
read, and reading can stop after any batch and resume there.
"""

import bz2
import gzip
import re
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple
from xml.etree import ElementTree

from trainyard.core.errors import UserError

READ_BYTES = 1 << 20
"""Bytes read from a file at a time."""
MAX_HEADER_BYTES = 1 << 20
"""Bound on the XML before the first page."""
MAX_PAGE_BYTES = 64 << 20
"""Bound on the bytes of a page with one revision. A page with its full history may exceed it."""
MAX_STREAM_BYTES = 4 << 20
"""Compressed bytes of a stream that are taken at once. A longer stream is decompressed in pieces."""
UNPACK_BYTES = 16 << 20
"""Bytes that are decompressed at once."""
STREAM_START = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")
"""First bytes of a bz2 stream: the header and its first block, or its end if it is empty."""
STREAM_START_BYTES = 10
PAGE_END = b"</page>"
DUMP_END = b"</mediawiki>"
HIDDEN_NAMESPACE_KEYS = ("6", "14")
"""Namespace keys of files and of categories."""
DECOMPRESSION_ERRORS = (OSError, EOFError, zlib.error)


class DumpPosition(NamedTuple):
    """The end of a batch."""

    file_index: int = 0
    stream_offset: int = 0
    """Byte of the file at which decompression can start: a bz2 stream starts there."""
    stream_xml_offset: int = 0
    """Bytes of XML before that stream."""
    xml_offset: int = 0
    """Bytes of XML before the next page."""


class WikiDump(NamedTuple):
    """A dump file and its site information."""

    path: Path
    base_url: str
    """Common start of all page addresses."""
    hidden_namespaces: frozenset[str] = frozenset()
    """Lowercase names, in the language of the wiki, of the namespaces whose links are not text."""


class PageBatch(NamedTuple):
    file_index: int
    xml_offset: int
    """Offset of the batch in the XML."""
    xml: bytes
    next_position: DumpPosition
    file_bytes_read: int
    """Compressed bytes of the file read so far."""
    error: str = ""
    """The reason for which nothing after this batch can be read; empty if it can."""


class XmlPart(NamedTuple):
    """Consecutive XML. The offsets are those of DumpPosition, for the last point where decompression can start."""

    stream_offset: int
    stream_xml_offset: int
    xml: bytes
    file_bytes_read: int


def open_dump(path: Path) -> WikiDump:
    """Read the site information at the start of a dump. Raises UserError if the file is not a dump."""
    header = b""
    try:
        for part in read_xml(path, DumpPosition(), 0):
            header += part.xml
            if b"<page>" in header or len(header) > MAX_HEADER_BYTES:
                break
    except DECOMPRESSION_ERRORS as error:
        if b"<mediawiki" not in header:
            raise UserError(f"{path}: cannot be read: {_reason(error)}") from None
    header = header[:MAX_HEADER_BYTES].partition(b"<page>")[0]
    if b"<mediawiki" not in header:
        raise UserError(
            f"{path}: not a MediaWiki dump (does not start with <mediawiki>); expected XML, or .bz2 or .gz of it"
        )
    start, end = header.find(b"<siteinfo>"), header.find(b"</siteinfo>")
    if min(start, end) < 0:
        return WikiDump(path, "")
    try:
        info = ElementTree.fromstring(header[start : end + len(b"</siteinfo>")])
    except ElementTree.ParseError as error:
        raise UserError(f"{path}: its <siteinfo> is not valid XML: {error}") from None
    hidden = [element.text for element in info.iter("namespace") if element.get("key") in HIDDEN_NAMESPACE_KEYS]
    base_url = (info.findtext("base") or "").rpartition("/")[0]
    return WikiDump(path, base_url, frozenset(name.lower() for name in hidden if name))


def page_batches(path: Path, start: DumpPosition, size: int, threads: int) -> Iterator[PageBatch]:
    """Whole pages, at least `size` bytes of XML per batch except the last, which reports a truncated file."""
    anchors = deque([(start.stream_offset, start.stream_xml_offset)])
    buffer, xml_offset, searched = bytearray(), start.xml_offset, 0
    total, file_bytes_read, error = start.stream_xml_offset, 0, ""
    try:
        for part in read_xml(path, start, threads):
            skip = max(start.xml_offset - total, 0)  # already read before the position to resume from
            total, file_bytes_read = total + len(part.xml), part.file_bytes_read
            anchors.append((part.stream_offset, part.stream_xml_offset))
            buffer += part.xml[skip:]
            while (found := buffer.find(PAGE_END, max(size - len(PAGE_END), searched))) >= 0:
                length = found + len(PAGE_END)
                while len(anchors) > 1 and anchors[1][1] <= xml_offset + length:
                    anchors.popleft()
                position = DumpPosition(start.file_index, *anchors[0], xml_offset + length)
                yield PageBatch(start.file_index, xml_offset, bytes(buffer[:length]), position, file_bytes_read)
                del buffer[:length]
                xml_offset, searched = xml_offset + length, 0
            searched = max(len(buffer) - len(PAGE_END), 0)
            if len(buffer) > size + MAX_PAGE_BYTES:
                page_offset = xml_offset + max(buffer.rfind(b"<page>"), 0)
                error = (
                    f"byte {page_offset} of its XML: a page of more than {MAX_PAGE_BYTES >> 20} MiB "
                    "(a dump with the full history?)"
                )
                break
    except DECOMPRESSION_ERRORS as exception:
        error = f"breaks off after byte {total} of its XML: {_reason(exception)}"
    length = buffer.rfind(PAGE_END) + len(PAGE_END) if PAGE_END in buffer else 0
    if not error and DUMP_END not in buffer[length:]:
        error = "ends before </mediawiki> (truncated?)"
    xml = bytes(buffer[:length] if error else buffer)
    yield PageBatch(start.file_index, xml_offset, xml, DumpPosition(start.file_index + 1), file_bytes_read, error)


def read_xml(path: Path, start: DumpPosition, threads: int) -> Iterator[XmlPart]:
    """The XML from `start.stream_xml_offset` on. The first bytes of the file tell its compression, not its name."""
    with path.open("rb") as file:
        magic = file.read(3)
        file.seek(start.stream_offset)
        if magic == b"BZh":
            yield from _read_bz2(file, start, threads)
        elif magic[:2] == b"\x1f\x8b":
            yield from _read_gzip(file)
        else:
            offset = start.stream_offset
            while block := file.read(READ_BYTES):
                yield XmlPart(offset, offset, block, offset + len(block))
                offset += len(block)


def _read_gzip(file: BinaryIO) -> Iterator[XmlPart]:
    with gzip.GzipFile(fileobj=file) as unpacked:
        while block := unpacked.read1(READ_BYTES):
            yield XmlPart(0, 0, block, file.tell())


def _read_bz2(file: BinaryIO, start: DumpPosition, threads: int) -> Iterator[XmlPart]:
    stream_offset, total = start.stream_offset, start.stream_xml_offset
    stream_xml_offset = total
    stream: bz2.BZ2Decompressor | None = None
    for offset, data, future in _decompress_ahead(_split_streams(file), threads):
        if stream is None or stream.eof:
            stream, xml = future.result() if future else _begin_stream(data)
            stream_offset, stream_xml_offset = offset, total
        else:
            # The middle of a long stream, or bytes that look like the start of one by chance.
            xml = stream.decompress(data, UNPACK_BYTES)
        while True:
            total += len(xml)
            yield XmlPart(stream_offset, stream_xml_offset, xml, offset + len(data))
            if stream.eof or stream.needs_input:
                break
            xml = stream.decompress(b"", UNPACK_BYTES)
        if stream.eof and stream.unused_data:
            raise OSError(
                f"byte {offset + len(data) - len(stream.unused_data)} of the file: expected the start of a bz2 stream"
            )
    if stream and not stream.eof:
        raise EOFError("the file ends inside a bz2 stream (truncated?)")


def _begin_stream(data: bytes) -> tuple[bz2.BZ2Decompressor, bytes]:
    stream = bz2.BZ2Decompressor()
    return stream, stream.decompress(data, UNPACK_BYTES)


def _split_streams(file: BinaryIO) -> Iterator[tuple[int, bool, bytes]]:
    """Pieces of the file as (offset, starts like a stream, data): a stream, or MAX_STREAM_BYTES of a longer one."""
    offset, is_start, buffer, searched = file.tell(), True, b"", 1
    while block := file.read(READ_BYTES):
        buffer += block
        start = 0
        for match in STREAM_START.finditer(buffer, searched):
            if match.start() > start:
                yield offset + start, is_start, buffer[start : match.start()]
            start, is_start = match.start(), True
        offset, buffer = offset + start, buffer[start:]
        searched = max(len(buffer) - STREAM_START_BYTES + 1, 1)
        if len(buffer) > MAX_STREAM_BYTES:
            yield offset, is_start, buffer[:-STREAM_START_BYTES]
            offset, is_start = offset + len(buffer) - STREAM_START_BYTES, False
            buffer, searched = buffer[-STREAM_START_BYTES:], 0
    if buffer:
        yield offset, is_start, buffer


def _decompress_ahead(
    pieces: Iterator[tuple[int, bool, bytes]], threads: int
) -> Iterator[tuple[int, bytes, "Future[tuple[bz2.BZ2Decompressor, bytes]] | None"]]:
    """The pieces in order, with streams decompressed ahead by threads (bz2 releases the interpreter lock)."""
    if not threads:
        yield from ((offset, data, None) for offset, _, data in pieces)
        return
    pending: deque[tuple[int, bytes, Future[tuple[bz2.BZ2Decompressor, bytes]] | None]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for offset, is_start, data in pieces:
            pending.append((offset, data, pool.submit(_begin_stream, data) if is_start else None))
            if len(pending) > 2 * threads:
                yield pending.popleft()
        yield from pending


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
