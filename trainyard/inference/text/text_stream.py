"""Turn a stream of tokens into a stream of text that is safe to show.

The text of a token depends on its neighbors: a UTF-8 character can span several tokens, SentencePiece drops the space
of the first token of a text, and a stop string can begin in one token and end in another. `TextStream` decodes a short
window of tokens, so the cost of a token does not grow with the length of the output.
"""

from collections.abc import Sequence

from trainyard.data.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""What tokenizers decode an incomplete or invalid UTF-8 sequence to."""
MAX_CHARACTER_TOKENS = 8
"""Tokens after which an incomplete character counts as invalid. It has at most four bytes; a U+FFFD in the text, which
looks incomplete, can precede it."""
MAX_PENDING = 16
"""Tokens without a character boundary between them after which the text is shown as it is."""


class TextStream:
    """The text of one output. Concatenating the results of all `push` and of `finish` gives the complete text."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), prompt: Sequence[int] = ()) -> None:
        """`stop`: strings that end the text. They are not part of it. `prompt`: the tokens before the text."""
        self.stopped = False
        """True once the text contains a stop string; later tokens give no text."""
        self.decoded_length = 0
        """Characters decoded so far, including those held back because a stop string may have begun."""
        self.shown_length = 0
        """Characters returned so far."""
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._context = list(prompt[-MAX_PENDING:])
        self._context_text = tokenizer.decode(self._context) if self._context else ""
        self._pending: list[int] = []
        self._held = ""

    def push(self, token: int) -> str:
        """Add a token. Returns the new text that no later token can change."""
        if self.stopped:
            return ""
        self._pending.append(token)
        text = self._decode(self._pending)
        if not text:
            del self._pending[:-MAX_PENDING]  # tokens without text, such as SentencePiece's control tokens
            return ""
        if not text.endswith(REPLACEMENT) or len(self._pending) >= MAX_PENDING:
            return self._show(self._accept(len(self._pending), text))
        if len(self._pending) > MAX_CHARACTER_TOKENS:
            return self._show(self._accept_invalid(text))
        return ""

    def finish(self) -> str:
        """End the text. Returns what was held back."""
        if self.stopped:
            return ""
        text = self._accept(len(self._pending), self._decode(self._pending)) if self._pending else ""
        shown = self._show(text)
        if not self.stopped:
            shown, self._held = shown + self._held, ""
            self.shown_length = self.decoded_length
        return shown

    def _decode(self, tokens: list[int]) -> str:
        """Text of `tokens` after the tokens before them."""
        text = self._tokenizer.decode(self._context + tokens)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # tokenizers' ByteFallback replaces a complete run of byte tokens if one of them is invalid.
        return self._tokenizer.decode(tokens)

    def _accept(self, count: int, text: str) -> str:
        """Make `text` of the first `count` pending tokens final; they are the context of the next ones."""
        if text:
            self._context, self._pending = self._pending[:count], self._pending[count:]
            self._context_text = self._tokenizer.decode(self._context)
        return text

    def _accept_invalid(self, text: str) -> str:
        """Accept what precedes the last character, in pending tokens whose bytes are not all valid UTF-8."""
        for last in (3, 2, 1):  # tokens of a character that the next token may complete
            head, tail = self._pending[:-last], self._pending[-last:]
            head_text = self._decode(head)
            if head_text and head_text + self._tokenizer.decode(tail) == text:  # cuts no character
                return self._accept(len(head), head_text)
        return ""

    def _show(self, text: str) -> str:
        """Add decoded text. Returns all text up to a stop string, or up to what may be the beginning of one."""
        self.decoded_length += len(text)
        text = self._held + text
        end = len(text)
        # The match that ends first, so that the result does not depend on how the text is split into tokens.
        matches = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            self.stopped = True
            self._held = ""
            end = min(matches)[1]
        else:
            end -= max((_overlap(text, stop) for stop in self._stop), default=0)
            self._held = text[end:]
        self.shown_length += end
        return text[:end]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
