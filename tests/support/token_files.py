"""Small token files for tests."""

from pathlib import Path

import numpy as np

from trainyard.data.formats.megatron_bin import MegatronTokens, MegatronTokensWriter


def write_documents(
    prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16", documents_per_add: int = 1
) -> MegatronTokens:
    """Write documents, each a list of sequences, `documents_per_add` at a time."""
    with MegatronTokensWriter(prefix, dtype) as writer:
        for start in range(0, len(documents), documents_per_add):
            group = documents[start : start + documents_per_add]
            sequences = [sequence for document in group for sequence in document]
            tokens = np.array([token for sequence in sequences for token in sequence], dtype)
            lengths = np.array([len(sequence) for sequence in sequences], np.int32)
            writer.add(tokens, lengths, np.array([len(document) for document in group], np.int64))
    return MegatronTokens(prefix)


def write_counting_documents(
    prefix: Path, lengths: list[int], first_token: int = 0, dtype: str = "int32"
) -> MegatronTokens:
    """Write documents of these lengths, whose tokens are consecutive integers."""
    ends = first_token + np.cumsum(lengths)
    documents = [[list(range(end - length, end))] for end, length in zip(ends.tolist(), lengths, strict=True)]
    return write_documents(prefix, documents, dtype, documents_per_add=len(documents))
