"""How the choices of a request are written: as a completion or a chat, complete or in chunks."""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from pydantic import BaseModel

from trainyard.inference.requests import FinishReason
from trainyard.inference.serve.api_types import CompletionRequest
from trainyard.inference.serve.chat_types import ChatCompletionRequest
from trainyard.inference.serve.generation import ChoiceDelta, TextToken
from trainyard.inference.serve.response_types import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatFinishReason,
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    ResponseToolCall,
    TopLogprob,
    Usage,
)
from trainyard.inference.serve.served_model import ServedModel, TokenTexts
from trainyard.inference.text.tool_calls import parse_tool_calls

MIN_LOGPROB = -9999.0
"""Stands for minus infinity and for NaN, which JSON does not have."""


class ResponseWriter(Protocol):
    def first_chunks(self) -> Iterable[BaseModel]:
        """What a stream begins with."""

    def chunk(self, delta: ChoiceDelta) -> BaseModel: ...

    def usage_chunk(self, usage: Usage) -> BaseModel: ...

    def complete(self, choices: Sequence[ChoiceDelta], usage: Usage) -> BaseModel:
        """The response that is not streamed; `choices` have all of their text."""


class CompletionWriter:
    def __init__(self, model: ServedModel, fields: CompletionRequest, echoes: list[str]) -> None:
        """`echoes`: text to put before that of each choice."""
        self._texts, self._with_logprobs, self._echoes = model.token_texts, fields.logprobs is not None, echoes
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}

    def first_chunks(self) -> Iterable[BaseModel]:
        for index, text in enumerate(self._echoes):
            if text:
                yield CompletionResponse(**self._head, choices=[CompletionChoice(index=index, text=text)])

    def chunk(self, delta: ChoiceDelta) -> BaseModel:
        return CompletionResponse(**self._head, choices=[self._choice(delta, delta.text)])

    def usage_chunk(self, usage: Usage) -> BaseModel:
        return CompletionResponse(**self._head, choices=[], usage=usage)

    def complete(self, choices: Sequence[ChoiceDelta], usage: Usage) -> BaseModel:
        texts = [self._echoes[choice.index] + choice.text for choice in choices]
        found = [self._choice(choice, text) for choice, text in zip(choices, texts, strict=True)]
        return CompletionResponse(**self._head, choices=found, usage=usage)

    def _choice(self, delta: ChoiceDelta, text: str) -> CompletionChoice:
        offset = len(self._echoes[delta.index])
        logprobs = completion_logprobs(delta.tokens, self._texts, offset) if self._with_logprobs else None
        return CompletionChoice(index=delta.index, text=text, logprobs=logprobs, finish_reason=delta.finish_reason)


class ChatWriter:
    def __init__(self, model: ServedModel, fields: ChatCompletionRequest) -> None:
        self._texts, self._with_logprobs, self._count = model.token_texts, bool(fields.logprobs), fields.n or 1
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}
        self._tool_names = {tool["function"]["name"] for tool in fields.offered_tools}
        self._max_calls = 1 if fields.parallel_tool_calls is False else None
        self._unparsed = [""] * self._count
        """Text of a stream in which there may be tool calls."""

    def first_chunks(self) -> Iterable[BaseModel]:
        for index in range(self._count):
            delta = {"role": "assistant", "content": ""}
            yield ChatCompletionChunk(**self._head, choices=[ChatChunkChoice(index=index, delta=delta)])

    def chunk(self, delta: ChoiceDelta) -> BaseModel:
        logprobs = chat_logprobs(delta.tokens, self._texts) if self._with_logprobs else None
        text = delta.text
        if self._tool_names:  # calls are known when the text is complete
            text = self._unparsed[delta.index] = self._unparsed[delta.index] + text
        text, finish_reason, calls = self._parse(text, delta.finish_reason)
        changed: dict[str, Any] = {"content": text} if text else {}
        if calls:
            changed["tool_calls"] = [{"index": index, **call.model_dump()} for index, call in enumerate(calls)]
        choice = ChatChunkChoice(index=delta.index, delta=changed, logprobs=logprobs, finish_reason=finish_reason)
        return ChatCompletionChunk(**self._head, choices=[choice])

    def _parse(
        self, text: str, finish_reason: FinishReason | None
    ) -> tuple[str, ChatFinishReason | None, list[ResponseToolCall]]:
        """The content of a choice, why it ended, and its tool calls; nothing of them before its end."""
        if not self._tool_names:
            return text, finish_reason, []
        if finish_reason is None:
            return "", None, []
        content, calls = parse_tool_calls(text, self._tool_names)
        found = [
            ResponseToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=CalledFunction(**call._asdict()))
            for call in calls[: self._max_calls]
        ]
        return content, "tool_calls" if found else finish_reason, found

    def usage_chunk(self, usage: Usage) -> BaseModel:
        return ChatCompletionChunk(**self._head, choices=[], usage=usage)

    def complete(self, choices: Sequence[ChoiceDelta], usage: Usage) -> BaseModel:
        return ChatCompletionResponse(**self._head, choices=[self._choice(choice) for choice in choices], usage=usage)

    def _choice(self, choice: ChoiceDelta) -> ChatChoice:
        text, finish_reason, calls = self._parse(choice.text, choice.finish_reason or "length")
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(content=None if calls and not text else text, tool_calls=calls or None),
            logprobs=chat_logprobs(choice.tokens, self._texts) if self._with_logprobs else None,
            finish_reason=finish_reason or "length",
        )


def completion_logprobs(tokens: Iterable[TextToken], texts: TokenTexts, first_offset: int) -> CompletionLogprobs:
    """`first_offset`: characters before the generated text, which an echoed prompt has."""
    found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token in tokens:
        event = token.event
        found.tokens.append(texts.text(event.token))
        found.token_logprobs.append(_finite(event.logprob))
        most_likely = {texts.text(other): _finite(logprob) for other, logprob in event.top_logprobs}
        found.top_logprobs.append(most_likely | {texts.text(event.token): _finite(event.logprob)})
        found.text_offset.append(first_offset + token.offset)
    return found


def chat_logprobs(tokens: Iterable[TextToken], texts: TokenTexts) -> ChatLogprobs:
    def entry(token: int, logprob: float | None) -> TopLogprob:
        return TopLogprob(token=texts.text(token), logprob=_finite(logprob), bytes=texts.utf8(token))

    content = []
    for token in tokens:
        chosen = entry(token.event.token, token.event.logprob)
        most_likely = [entry(other, logprob) for other, logprob in token.event.top_logprobs]
        content.append(ChatTokenLogprob(**chosen.model_dump(), top_logprobs=most_likely))
    return ChatLogprobs(content=content)


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and logprob > MIN_LOGPROB else MIN_LOGPROB  # a comparison with NaN is false
