"""Folders of small random transformers models with a tokenizer, as save_pretrained writes them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tests.support.hf_reference import hf_model

TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Déjà vu: 你好, world!",
    "a",
    "numbers 1 2 3 4 5 " * 20,
] * 4
VOCAB = 300
SIZES = {"llama": {"num_hidden_layers": 4, "num_key_value_heads": 2}, "gpt": {"n_layer": 4}, "bert": {}}
MAX_POSITIONS = {"llama": "max_position_embeddings", "gpt": "n_positions", "bert": "max_position_embeddings"}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with an end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet)
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0])


def copy_without_end_token(source: Path, directory: Path) -> None:
    """Copy a folder; the tokenizer of the copy has no special token, and only config.json has an eos_token_id."""
    shutil.copytree(source, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text().replace("<|endoftext|>", "<plain>"))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": []}))
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        (directory / name).unlink(missing_ok=True)


def edit_json(path: Path, **keys: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | keys))


def save_hf_folder(directory: Path, family: str) -> Any:
    """Save a random model and its tokenizer; returns the model."""
    sizes = {"vocab_size": VOCAB, MAX_POSITIONS[family]: 128, "eos_token_id": 0, "bos_token_id": 0, **SIZES[family]}
    model = hf_model("gpt2" if family == "gpt" else family, **sizes)
    model.save_pretrained(directory)
    if family != "bert":
        make_tokenizer().save_pretrained(directory)
    return model


@torch.no_grad()
def hf_stream_loss(model: Any, tokens: Tensor, max_length: int, stride: int) -> tuple[float, int]:
    """Sum and number of token losses of a stream, by the loop of transformers' guide on perplexity: windows of
    `max_length` tokens, `stride` apart, in which only the tokens after the previous window count."""
    total, count, previous_end = 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + max_length, len(tokens))
        target_length = end - previous_end
        inputs = tokens[None, begin:end].long()
        targets = inputs.clone()
        targets[:, :-target_length] = -100
        scored = int((targets[:, 1:] != -100).sum())  # the model shifts the labels
        if scored:
            total += float(model(inputs, labels=targets).loss.double()) * scored
        count, previous_end = count + scored, end
        if end == len(tokens):
            break
    return total, count
