"""inputs.jsonl: the first samples of a run, with which of their tokens are trained, for the dashboard."""

import json
from pathlib import Path
from typing import Any

from trainyard.config.schema import Config
from trainyard.core.atomic_files import atomic_write_text
from trainyard.data.loading.loader import BatchLoader
from trainyard.data.loading.text_stream import tokenizer_spec
from trainyard.data.text.marked_text import TextWithLosses, marked_pairs, marked_text
from trainyard.data.text.tokenizer import load_tokenizer

INPUTS_FILE = "inputs.jsonl"
MAX_SAMPLES = 8
"""Samples that are written; of preferences, pairs."""
MAX_TOKENS = 2048
"""Of a sample, or of an answer, as many tokens are written as text."""


def write_training_texts(directory: Path, config: Config, loader: BatchLoader) -> None:
    """Write samples of the first step. Nothing for data of which all tokens are trained, and when a run resumes."""
    file = directory / INPUTS_FILE
    if file.exists() or not config.data.has_flag("has_documents"):
        return
    tokenizer = load_tokenizer(tokenizer_spec(config.data, config.model.new_tokens))
    indices = loader.sample_indices(0, slice(0, MAX_SAMPLES))
    batch = loader.dataset.samples(indices)
    records: list[dict[str, Any]] = []
    for row, index in enumerate(indices.tolist()):
        of_sample = {"sample": index, "source": loader.dataset.source(index)}
        tokens, labels = batch["tokens"][row].tolist(), batch["labels"][row].tolist()
        if config.data.has_flag("has_pairs"):
            pairs = marked_pairs(tokens, labels, batch["document_ids"][row].tolist(), tokenizer, MAX_TOKENS)
            for number, pair in enumerate(pairs, 1):
                place = {"pair": number, "pairs": len(pairs)}
                texts = {name: text_record(text) for name, text in pair._asdict().items()}
                records.append(of_sample | place | texts)
        else:
            records.append(of_sample | text_record(marked_text(tokens, labels, tokenizer, MAX_TOKENS)))
    atomic_write_text(file, "".join(f"{json.dumps(record)}\n" for record in records[:MAX_SAMPLES]))


def text_record(text: TextWithLosses) -> dict[str, Any]:
    shown = min(text.num_tokens, MAX_TOKENS)
    return {"tokens": text.num_tokens, "trained": text.num_trained, "shown": shown, "parts": text.parts}
