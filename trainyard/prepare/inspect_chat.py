"""Inspection of conversations: formats, turns, roles and lengths of their records."""

from collections import Counter
from pathlib import Path

import numpy as np

from trainyard.core.errors import UserError
from trainyard.data.formats.conversations import detect_format, read_conversation
from trainyard.data.formats.documents import describe_place, read_records, record_slices, total_bytes
from trainyard.prepare.inspect import (
    SAMPLE_CHARACTERS,
    Excerpt,
    InspectOptions,
    InspectReport,
    LengthStats,
    OnProgress,
)


def inspect_chat(path: Path, options: InspectOptions, on_progress: OnProgress) -> InspectReport:
    formats: Counter[str] = Counter()
    roles: Counter[str] = Counter()
    turns, characters, size = LengthStats(), LengthStats(), total_bytes([path])
    with_tools = unreadable = done = 0
    samples: list[Excerpt] = []
    for input_slice in record_slices([path]):
        counts: list[tuple[int, int]] = []
        for place, record in read_records(input_slice):
            try:
                if isinstance(record, str):
                    raise UserError(record)
                conversation = read_conversation(record)
            except UserError as error:
                if options.check:
                    raise UserError(f"{describe_place(input_slice, place)}: {error}") from None
                unreadable += 1
                continue
            texts = [str(message.get("content") or "") for message in conversation.messages]
            texts = texts or [conversation.prompt, conversation.completion]
            formats[detect_format(record)] += 1
            roles.update(message["role"] for message in conversation.messages)
            with_tools += bool(conversation.tools)
            counts.append((len(texts), sum(map(len, texts))))
            if len(samples) < options.num_samples:
                samples.append((describe_place(input_slice, place), " | ".join(texts)[:SAMPLE_CHARACTERS]))
        turns.add(np.array([number for number, _ in counts], np.int64))
        characters.add(np.array([length for _, length in counts], np.int64))
        done += input_slice.input_bytes
        on_progress(done, size)
    facts = {
        "formats": {name: f"{count:,}" for name, count in formats.most_common()},
        "conversations": sum(formats.values()),
        "malformed": unreadable,
        "roles": {role: f"{count:,} messages" for role, count in roles.most_common()},
        "with tools": with_tools,
        "bytes": size,
        **({"checked": "all records"} if options.check else {}),
    }
    lengths = {"messages per conversation": turns.summary(), "characters per conversation": characters.summary()}
    return InspectReport(str(path), "conversations", facts, lengths, samples)
