"""Prompts as tokens, each with its record, whose other keys rewards read."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.config.data_schema import DataSection
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.user_code import describe_object
from trainyard.data.formats.conversations import Conversation, read_conversation
from trainyard.data.formats.documents import InputSlice, describe_place, read_records, record_slices
from trainyard.data.loading.conversation_samples import chat_spec
from trainyard.data.loading.data_files import match_files
from trainyard.data.loading.dataset import Indices
from trainyard.data.loading.demo_corpus import prompt_lines
from trainyard.data.loading.text_stream import check_vocab_size, tokenizer_spec
from trainyard.data.samples import Sample
from trainyard.data.text.chat_encoder import RENDERED_AT, ChatEncoder, chat_encoder
from trainyard.data.text.tokenizer import load_tokenizer
from trainyard.families import ModelConfig
from trainyard.remote.chunks.remote_path import RemoteFiles

logger = logging.getLogger(__name__)
LOG_INTERVAL_S = 2.0
BUILT_IN = Path("built-in prompts")
Prompt = str | list[dict[str, Any]]
"""Text without a template, or messages."""


class EncodedPrompt(NamedTuple):
    prompt: Prompt
    tokens: list[int]
    """After which the model writes its answer."""
    record: Mapping[str, Any]
    piece: InputSlice
    place: int
    """Where `piece` has the record."""

    @property
    def source(self) -> str:
        """For people. Takes as long as reading the file up to there."""
        return describe_place(self.piece, self.place)


class PromptSamples:
    """The prompts of files. A sample of the dataset is a prompt without labels: what is trained comes later."""

    def __init__(self, encoder: ChatEncoder, encoded: Sequence[EncodedPrompt], seq_len: int) -> None:
        self.encoder, self.encoded, self.seq_len = encoder, encoded, seq_len
        self.prompts = [each.prompt for each in encoded]
        self.tokens = [each.tokens for each in encoded]
        self.records = [each.record for each in encoded]
        self.end_ids = _end_ids(encoder, self.prompts[0])
        """Tokens that end an answer."""

    def __len__(self) -> int:
        return len(self.tokens)

    def source(self, index: int) -> str:
        """Where a prompt comes from, for people."""
        return self.encoded[index].source

    def samples(self, indices: Indices) -> Sample:
        tokens = np.zeros((len(indices), self.seq_len), np.int32)
        for row, index in zip(tokens, indices.tolist(), strict=True):
            prompt = self.tokens[index][: self.seq_len]
            row[: len(prompt)] = prompt
        labels: NDArray[np.int32] = np.full_like(tokens, IGNORE_INDEX)
        return {"tokens": tokens, "labels": labels}


def open_prompts(
    data: DataSection, paths: Sequence[str], remote: RemoteFiles | None, model: ModelConfig, room: int
) -> PromptSamples:
    """The prompts of files, of which none has more than `room` tokens; without `paths`, built-in ones."""
    check_vocab_size(load_tokenizer(tokenizer_spec(data, model.new_tokens)), model.vocab)
    encoder, found = chat_encoder(chat_spec(data, model.new_tokens)), list[EncodedPrompt]()
    logged = time.monotonic()
    for each in _encode_prompts(encoder, _prompt_slices(data, paths, remote)):
        found.append(each)
        if (now := time.monotonic()) - logged > LOG_INTERVAL_S:
            logger.info("encoding prompts: %s so far", f"{len(found):,}")
            logged = now
    if not found:
        raise UserError(f"{', '.join(paths)}: no prompt")
    kept = [each for each in found if len(each.tokens) <= room]
    if dropped := len(found) - len(kept):
        if data.chat.too_long != "drop" or not kept:
            first = next(each for each in found if len(each.tokens) > room)
            longest = max(len(each.tokens) for each in found)
            raise UserError(
                f"{first.source}: {counted(len(first.tokens), 'token')}, and data.seq_len={data.seq_len} less "
                f"rollout.max_new_tokens leaves {room}; {counted(dropped, 'prompt')} of {len(found)} "
                f"{'is' if dropped == 1 else 'are'} longer; "
                f"nearest: data.seq_len={data.seq_len - room + longest}, or data.chat.too_long=drop"
            )
        logger.warning("data.chat.too_long=drop: dropped %s of %s", counted(dropped, "prompt"), len(found))
    return PromptSamples(encoder, kept, data.seq_len)


def answer_ends(data: DataSection, remote: RemoteFiles | None, model: ModelConfig) -> frozenset[int]:
    """The tokens that end the answers to the first prompt."""
    encoder = chat_encoder(chat_spec(data, model.new_tokens))
    first = next(_encode_prompts(encoder, _prompt_slices(data, data.paths, remote)))
    return _end_ids(encoder, first.prompt)


def _prompt_slices(data: DataSection, paths: Sequence[str], remote: RemoteFiles | None) -> Iterator[InputSlice]:
    if paths:
        yield from record_slices(match_files(paths, directories=True, remote=remote))
    elif data.tokenizer == "bytes":
        lines = prompt_lines()
        yield InputSlice(BUILT_IN, "lines", 0, len(lines), lines)
    else:
        raise UserError("data.paths: missing; set it to prompts (or data.tokenizer=bytes for the built-in prompts)")


def _encode_prompts(encoder: ChatEncoder, slices: Iterable[InputSlice]) -> Iterator[EncodedPrompt]:
    kind: type | None = None
    for piece in slices:
        for place, record in read_records(piece):
            try:
                if isinstance(record, str):
                    raise UserError(record)
                prompt = read_prompt(record)
                if not isinstance(prompt, kind := kind or type(prompt)):
                    raise UserError("some prompts are text and others messages; expected one kind")
                tokens = encode_prompt(encoder, prompt, record)
            except UserError as error:
                raise UserError(f"{describe_place(piece, place)}: {error}") from None
            yield EncodedPrompt(prompt, tokens, record, piece, place)


def read_prompt(record: Mapping[str, Any]) -> Prompt:
    """The prompt of a record. Raises UserError with the reason if it has none."""
    prompt = record.get("prompt", record.get("messages"))
    if isinstance(prompt, str) and prompt:
        return prompt
    if prompt is None:
        raise UserError(f"no prompt: expected prompt as text or messages; found {', '.join(map(str, record))}")
    if not isinstance(prompt, list) or not prompt:
        raise UserError(
            f"prompt is {'empty' if prompt in ('', []) else describe_object(prompt)}; expected text or messages"
        )
    answer = {"role": "assistant", "content": ""}
    messages = read_conversation({"messages": [*prompt, answer], "tools": record.get("tools")}, "messages").messages
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise UserError("the last message of the prompt is an answer, which the model writes; expected a user's")
    return messages[:-1]


def encode_prompt(encoder: ChatEncoder, prompt: Prompt, record: Mapping[str, Any]) -> list[int]:
    """The tokens after which the model writes its answer."""
    if isinstance(prompt, str):
        tokens: list[int] = encoder.fast.encode(prompt, add_special_tokens=False).ids
        return [*encoder.prefix, *tokens]
    text = encoder.template.render(prompt, True, record.get("tools"), RENDERED_AT)
    found: list[int] = encoder.fast.encode(text, add_special_tokens=False).ids
    return found


def _end_ids(encoder: ChatEncoder, prompt: Prompt) -> frozenset[int]:
    """The tokens that end the answers to prompts like this one: those that training on answers would train."""
    if isinstance(prompt, str):
        return encoder.encode(Conversation([], prompt=prompt, completion="a")).end_ids
    answer = {"role": "assistant", "content": "a"}
    return encoder.encode(read_conversation({"messages": [*prompt, answer]}, "messages")).end_ids
