"""inputs.jsonl: the first samples of a run, with which of their tokens are trained, for the dashboard."""

import json
from pathlib import Path

from trainyard.config.schema import Config
from trainyard.core.atomic_files import atomic_write_text
from trainyard.data.loading.loader import BatchLoader
from trainyard.data.loading.text_stream import tokenizer_spec
from trainyard.data.text.marked_text import marked_text
from trainyard.data.text.tokenizer import load_tokenizer

INPUTS_FILE = "inputs.jsonl"
MAX_SAMPLES = 8
MAX_TOKENS = 2048
"""Of a sample, as many tokens are written as text."""


def write_training_texts(directory: Path, config: Config, loader: BatchLoader) -> None:
    """Write samples of the first step. Nothing for data of which all tokens are trained, and when a run resumes."""
    file = directory / INPUTS_FILE
    data = config.data
    if file.exists() or not data.has_flag("has_documents") or data.has_flag("has_prompts"):
        return
    tokenizer = load_tokenizer(tokenizer_spec(config.data, config.model.new_tokens))
    indices = loader.sample_indices(0, slice(0, MAX_SAMPLES))
    batch = loader.dataset.samples(indices)
    lines = []
    for index, tokens, labels in zip(indices.tolist(), batch["tokens"].tolist(), batch["labels"].tolist(), strict=True):
        text = marked_text(tokens, labels, tokenizer, MAX_TOKENS)
        counts = {"tokens": text.num_tokens, "trained": text.num_trained, "shown": min(text.num_tokens, MAX_TOKENS)}
        record = {"sample": index, "source": loader.dataset.source(index), **counts, "parts": text.parts}
        lines.append(json.dumps(record))
    atomic_write_text(file, "".join(f"{line}\n" for line in lines))
