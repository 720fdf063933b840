"""JSON schemas: which tokens can come next in a text that is JSON of a given schema."""

import functools
from typing import Any

import torch
from torch import Tensor

from trainyard.core.errors import UserError, one_line
from trainyard.data.text.tokenizer import ByteTokenizer, FastTokenizer, Tokenizer, byte_tokenizer

KEPT_SCHEMAS = 64
"""Compiled schemas that stay in memory."""
COMPACT: Any = {"whitespace_flexible": False}
"""JSON without spaces and line breaks: a weak model would write them without end."""


class SchemaCompiler:
    """Compiles JSON schemas for the vocabulary of a model. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_ids: frozenset[int]) -> None:
        """`vocab`: tokens of the model, which may have more of them than the tokenizer."""
        self._tokenizer, self._vocab, self._end_ids = tokenizer, vocab, end_ids
        self._compile = functools.lru_cache(KEPT_SCHEMAS)(self._compile_schema)

    def start(self, schema: str) -> "SchemaMatcher":
        """A matcher at the beginning of a text. Raises UserError if the schema is not valid or not supported."""
        return SchemaMatcher(self._compile(schema).deep_copy())

    @functools.cached_property
    def _vocabulary(self) -> Any:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise UserError("a JSON schema needs the package llguidance: pip install 'trainyard[serve]'") from None
        if isinstance(self._tokenizer, FastTokenizer):
            fast = self._tokenizer.tokenizer
        elif isinstance(self._tokenizer, ByteTokenizer):
            fast = byte_tokenizer()
        else:
            raise UserError("a JSON schema needs a tokenizer.json; this checkpoint has a SentencePiece model")
        return LLTokenizer(fast.to_str(), n_vocab=self._vocab, eos_token=sorted(self._end_ids) or None)

    def _compile_schema(self, schema: str) -> Any:
        vocabulary = self._vocabulary
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=COMPACT)
        except ValueError as error:
            raise UserError(f"the JSON schema is not valid: {one_line(error)}") from None
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise UserError(f"the JSON schema is not supported: {one_line(ValueError(matcher.get_error()))}")
        return matcher


class SchemaMatcher:
    """Follows one text."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def push(self, token: int) -> bool:
        """Add a token. Returns whether the text can continue."""
        self._matcher.consume_token(token)
        return not self._matcher.is_stopped()

    @property
    def failed(self) -> bool:
        """True if the text cannot be completed: the grammar became too complex."""
        return bool(self._matcher.is_error())

    def next_tokens(self) -> Tensor:
        """The tokens that may follow, as words of a bit mask. End tokens are among them if the text can end here."""
        return torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
