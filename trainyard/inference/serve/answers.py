"""How the choices of a request are written: as a completion or a chat, complete or in chunks."""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from pydantic import BaseModel

from trainyard.inference.requests import FinishReason
from trainyard.inference.serve.api_types import CompletionRequest
from trainyard.inference.serve.chat_types import ChatCompletionRequest
from trainyard.inference.serve.generation import ChoiceDelta
from trainyard.inference.serve.logprobs import chat_logprobs, completion_logprobs
from trainyard.inference.serve.response_types import (
    AnswerToolCall,
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatFinishReason,
    CompletionChoice,
    CompletionResponse,
    Usage,
)
from trainyard.inference.serve.served_model import ServedModel
from trainyard.inference.text.tool_calls import parse_tool_calls


class AnswerFormat(Protocol):
    def first_chunks(self) -> Iterable[BaseModel]:
        """What a stream begins with."""

    def chunk(self, delta: ChoiceDelta) -> BaseModel: ...

    def usage_chunk(self, usage: Usage) -> BaseModel: ...

    def complete(self, choices: Sequence[ChoiceDelta], usage: Usage) -> BaseModel:
        """The answer that is not streamed; `choices` have all of their text."""


class CompletionFormat:
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


class ChatFormat:
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
    ) -> tuple[str, ChatFinishReason | None, list[AnswerToolCall]]:
        """The content of a choice, why it ended, and its tool calls; nothing of them before its end."""
        if not self._tool_names:
            return text, finish_reason, []
        if finish_reason is None:
            return "", None, []
        content, calls = parse_tool_calls(text, self._tool_names)
        found = [
            AnswerToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=CalledFunction(**call._asdict()))
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
