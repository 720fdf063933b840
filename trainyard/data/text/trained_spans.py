"""Which characters of a rendered conversation a model is trained on: what it writes itself when it answers.

An answer begins after the generation prompt and ends with the end-of-turn token, so it includes what the template
writes around the content: `<think>`, calls of tools. Where the template has `{% generation %}`, an answer is what is in
it, and the end-of-turn token. All offsets are those of one rendering.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from trainyard.data.text.chat_template import ChatTemplate, MarkedText, Message

ANSWERS = "assistant"
"""The role of a model in a conversation."""
HEADER_END = re.compile(r".*[\s>\]|:]", re.DOTALL)
"""Up to a place where a header may end: half a tag is none."""


class TrainedText(NamedTuple):
    text: str
    spans: list[tuple[int, int]]
    """Trained characters, in order, without overlaps."""
    ends: set[str]
    """The tokens that end trained answers."""
    needs_end: bool
    """The last message is trained, and the template writes no token that ends it."""


class SpecialTokens:
    """The special tokens of a tokenizer, to find in a text."""

    def __init__(self, tokens: Collection[str], bos: str | None) -> None:
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        self.bos, self.any = bos, "|".join(map(re.escape, longest_first)) or "(?!)"
        self.at_end = re.compile(rf"({self.any})\s*\Z")
        self.at_start = re.compile(rf"\s*({self.any})")


def trained_text(
    template: ChatTemplate,
    marked: MarkedText,
    messages: Sequence[Message],
    trained: Sequence[bool],
    special: SpecialTokens,
) -> TrainedText:
    """The trained characters of a rendering of `messages`; `trained` says of each whether it is."""
    text, spans, ends, needs_end = marked.text, [], set(), False
    for index, (start, stop) in sorted(marked.turns.items()):
        if not trained[index]:
            continue
        is_answer = messages[index].get("role") == ANSWERS
        first = _content_start(template.generation_prompt if is_answer else "", marked, index)
        inside = [(max(a, start), min(b, stop)) for a, b in marked.generated if a < stop and b > start]
        if inside and is_answer:
            spans += inside[:-1]
            first = inside[-1][0]
            stop = max(stop, inside[-1][1])
        last, end = _end_of_turn(text, first, stop, special)
        if inside and is_answer:
            last = inside[-1][1] if end is None else max(last, inside[-1][1])
        if is_answer and end is not None:
            ends.add(end)
        elif is_answer and index == len(messages) - 1:
            needs_end, last = True, len(text)
        if last > first:
            spans.append((first, last))
    return TrainedText(text, spans, ends, needs_end)


def _content_start(prompt: str, marked: MarkedText, index: int) -> int:
    """Where the part of a turn begins that is not its header."""
    start, stop = marked.turns[index]
    content = marked.content_starts.get(index)
    turn = marked.text[start:stop]
    if prompt and turn.startswith(prompt):
        return start + len(prompt)
    # The prompt may begin more than the header, such as `<think>`, which the template leaves out of earlier answers.
    same = next((at for at, pair in enumerate(zip(prompt, turn, strict=False)) if pair[0] != pair[1]), len(turn))
    header = HEADER_END.match(turn[: min(same, len(prompt))])
    if header:
        return min(start + header.end(), stop if content is None else max(content, start))
    return start if content is None else content


def _end_of_turn(text: str, first: int, stop: int, special: SpecialTokens) -> tuple[int, str | None]:
    """Where a turn ends, and the token that ends it: the last one of the turn, or where templates only write the
    header of the next turn, as GLM's, that."""
    if found := special.at_end.search(text, first, stop):
        return found.end(1), found[1]
    if stop < len(text) and (found := special.at_start.match(text, stop)) and found[1] != special.bos:
        return found.end(1), found[1]
    return first + len(text[first:stop].rstrip()), None


def trained_roles(train_on: Sequence[str], messages: Sequence[Mapping[str, object]]) -> list[bool]:
    """Whether each message is trained by its role."""
    if list(train_on) == ["completion"]:
        last = max((index for index, each in enumerate(messages) if each.get("role") == ANSWERS), default=-1)
        return [index == last for index in range(len(messages))]
    return [each.get("role") in train_on for each in messages]
