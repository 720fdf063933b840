"""How the choices of a request are written: as a completion or a chat, complete or in chunks."""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Protocol

from pydantic import BaseModel

from trainyard.serve.api_types import ChatCompletionRequest, CompletionRequest
from trainyard.serve.generation import ChoiceDelta
from trainyard.serve.logprobs import chat_logprobs, completion_logprobs
from trainyard.serve.response_types import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    CompletionChoice,
    CompletionResponse,
    Usage,
)
from trainyard.serve.served_model import ServedModel


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

    def first_chunks(self) -> Iterable[BaseModel]:
        for index in range(self._count):
            delta = {"role": "assistant", "content": ""}
            yield ChatCompletionChunk(**self._head, choices=[ChatChunkChoice(index=index, delta=delta)])

    def chunk(self, delta: ChoiceDelta) -> BaseModel:
        logprobs = chat_logprobs(delta.tokens, self._texts) if self._with_logprobs else None
        choice = ChatChunkChoice(
            index=delta.index,
            delta={"content": delta.text} if delta.text else {},
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
        )
        return ChatCompletionChunk(**self._head, choices=[choice])

    def usage_chunk(self, usage: Usage) -> BaseModel:
        return ChatCompletionChunk(**self._head, choices=[], usage=usage)

    def complete(self, choices: Sequence[ChoiceDelta], usage: Usage) -> BaseModel:
        found = [
            ChatChoice(
                index=choice.index,
                message=AssistantMessage(content=choice.text),
                logprobs=chat_logprobs(choice.tokens, self._texts) if self._with_logprobs else None,
                finish_reason=choice.finish_reason or "length",
            )
            for choice in choices
        ]
        return ChatCompletionResponse(**self._head, choices=found, usage=usage)
