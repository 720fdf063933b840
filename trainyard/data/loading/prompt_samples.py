"""Prompts as tokens, each with its record, whose other keys rewards read."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
BUILT_IN = Path("built-in prompts")
Prompt = str | list[dict[str, Any]]
"""Text without a template, or messages."""


class PromptSamples:
    """The prompts of files. A sample of the dataset is a prompt without labels: what is trained comes later."""

    def __init__(
        self, encoder: ChatEncoder, records: Sequence[Mapping[str, Any]], places: Sequence[str], seq_len: int
    ) -> None:
        self.encoder, self.records, self.places, self.seq_len = encoder, records, places, seq_len
        self.prompts: list[Prompt] = [read_prompt(record) for record in records]
        self.tokens = [encode_prompt(encoder, *each) for each in zip(self.prompts, records, strict=True)]
        self.end_ids = _end_ids(encoder, self.prompts[0])
        """Tokens that end an answer."""

    def __len__(self) -> int:
        return len(self.tokens)

    def source(self, index: int) -> str:
        """Where a prompt comes from, for people."""
        return self.places[index]

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
    records: list[dict[str, Any]] = []
    places: list[str] = []
    kinds: set[type] = set()
    if paths:
        slices = [*record_slices(match_files(paths, directories=True, remote=remote))]
    elif data.tokenizer == "bytes":
        lines = prompt_lines()
        slices = [InputSlice(BUILT_IN, "lines", 0, len(lines), lines)]
    else:
        raise UserError("data.paths: missing; set it to prompts (or data.tokenizer=bytes for the built-in prompts)")
    for piece in slices:
        for place, record in read_records(piece):
            try:
                if isinstance(record, str):
                    raise UserError(record)
                kinds.add(type(read_prompt(record)))
                if len(kinds) > 1:
                    raise UserError("some prompts are text and others messages; expected one kind")
            except UserError as error:
                raise UserError(f"{describe_place(piece, place)}: {error}") from None
            records.append(record)
            places.append(describe_place(piece, place))
    if not records:
        raise UserError(f"{', '.join(paths)}: no prompt")
    encoder = chat_encoder(chat_spec(data, model.new_tokens))
    prompts = PromptSamples(encoder, records, places, data.seq_len)
    lengths = np.array([len(tokens) for tokens in prompts.tokens])
    longer = np.flatnonzero(lengths > room)
    if not longer.size:
        return prompts
    if data.chat.too_long == "drop" and len(longer) < len(records):
        logger.warning("data.chat.too_long=drop: dropped %s of %s", counted(len(longer), "prompt"), len(records))
        kept = np.flatnonzero(lengths <= room).tolist()
        return PromptSamples(encoder, [records[i] for i in kept], [places[i] for i in kept], data.seq_len)
    raise UserError(
        f"{places[longer[0]]}: {lengths[longer[0]]} tokens, and data.seq_len={data.seq_len} less "
        f"rollout.max_new_tokens leaves {room}; {counted(len(longer), 'prompt')} of {len(records)} "
        f"{'is' if len(longer) == 1 else 'are'} longer; "
        f"nearest: data.seq_len={data.seq_len - room + int(lengths.max())}, or data.chat.too_long=drop"
    )


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
