"""Bytes of the UTF-8 text that scored tokens decode to, the unit of bits per byte."""

from collections.abc import Iterable
from itertools import pairwise

from trainyard.data.loading.token_samples import TokenStream
from trainyard.data.text.tokenizer import Tokenizer


def row_bytes(rows: Iterable[list[int]], tokenizer: Tokenizer) -> int:
    """Bytes of the texts that rows of tokens decode to, without special tokens."""
    special_ids = tokenizer.special_ids
    texts = (tokenizer.decode([token for token in row if token not in special_ids]) for row in rows)
    return sum(len(text.encode()) for text in texts)


def stream_bytes(stream: TokenStream, tokenizer: Tokenizer, skip_document_starts: bool) -> int:
    """Bytes of the text of a stream without its first token, which is not scored; with `skip_document_starts`, without
    the first token of every document. Documents are decoded one by one."""
    starts = stream.document_starts(0, len(stream)).tolist()
    bounds = [*starts, len(stream)] if starts and starts[0] == 0 else [0, *starts, len(stream)]

    def documents() -> Iterable[list[int]]:
        for start, end in pairwise(bounds):
            first = start + int(start == 0 or skip_document_starts)
            if first < end:
                yield stream.tokens(first, end - first).tolist()

    return row_bytes(documents(), tokenizer)
