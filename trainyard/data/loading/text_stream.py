"""Text files as one stream of tokens in memory."""

import logging
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from trainyard.config.data_schema import DataSection
from trainyard.core.errors import UserError
from trainyard.data.formats import documents
from trainyard.data.formats.documents import InputSlice
from trainyard.data.loading.data_files import match_files
from trainyard.data.loading.demo_corpus import make_stories
from trainyard.data.loading.token_samples import ContiguousTokens
from trainyard.data.text.tokenizer import Tokenizer, TokenizerSpec, document_end_id, load_tokenizer
from trainyard.families import ModelConfig
from trainyard.remote.chunks.remote_path import DataPath, RemoteFiles

logger = logging.getLogger(__name__)

DEMO_DOCUMENTS = 1500


def read_text(
    data: DataSection, model: ModelConfig, paths: Sequence[str], remote: RemoteFiles | None = None
) -> ContiguousTokens:
    """Tokenize every document into memory, with the end token after each."""
    tokenizer = load_tokenizer(tokenizer_spec(data, model.new_tokens))
    check_vocab_size(tokenizer, model.vocab)
    if not paths:
        if data.tokenizer != "bytes":
            raise UserError("data.paths: missing; set it to text files (or data.tokenizer=bytes for the built-in text)")
        return encode_documents([make_stories(DEMO_DOCUMENTS)], tokenizer, "the built-in text")
    files = match_files(paths, directories=True, remote=remote)
    return encode_documents(text_blocks(files), tokenizer, ", ".join(paths))


def check_vocab_size(tokenizer: Tokenizer, model_vocab: int) -> None:
    if tokenizer.vocab_size > model_vocab:
        raise UserError(
            f"model.vocab={model_vocab}: the tokenizer has {tokenizer.vocab_size} tokens; "
            f"nearest: {tokenizer.vocab_size}"
        )


def text_blocks(paths: Sequence[DataPath], text_key: str = "text") -> Iterator[list[str]]:
    """The documents of text files, some at a time. `text_key` is the JSON key or column that holds the text."""
    for path in paths:
        logger.info("reading %s", path)
        for input_slice in _text_slices(path):
            texts, unreadable = documents.read_documents(input_slice, [text_key])
            if unreadable:
                raise UserError(str(unreadable[0]))
            yield [text for (text,) in texts]


def encode_documents(blocks: Iterable[list[str]], tokenizer: Tokenizer, name: str) -> ContiguousTokens:
    """The tokens of all documents in memory, with the end token after each. `name` is for error messages."""
    token_arrays = [np.zeros(0, np.int32)]
    length_arrays = [np.zeros(0, np.int64)]
    end_id = document_end_id(tokenizer)
    for texts in blocks:
        tokens, lengths = tokenizer.encode(texts)
        token_arrays.append(np.insert(tokens, np.cumsum(lengths), end_id))
        length_arrays.append(lengths + 1)
    lengths = np.concatenate(length_arrays)
    return ContiguousTokens(name, np.concatenate(token_arrays), np.cumsum(lengths) - lengths)


def _text_slices(path: DataPath) -> Iterable[InputSlice]:
    """Slices of a file; a file of an unknown kind is one document."""
    known = path.is_dir() or path.suffix in documents.KIND_BY_SUFFIX.keys() | documents.COMPRESSION_BY_SUFFIX.keys()
    return documents.input_slices([path]) if known else [InputSlice(path, "text", 0, 0)]


def tokenizer_spec(data: DataSection, new_tokens: tuple[str, ...]) -> TokenizerSpec:
    """The tokenizer of a run: that of its data, and the model.new_tokens."""
    return TokenizerSpec(data.tokenizer, data.vocab_file, data.merges_file, data.end_of_text, new_tokens=new_tokens)
