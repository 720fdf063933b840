"""Writes any tokenizer of this package as the files that transformers' AutoTokenizer reads."""

import json
from typing import Any

from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers

from trainyard.data.text.gpt2_bytes import byte_to_char
from trainyard.data.text.tokenizer import ByteTokenizer, FastTokenizer, TokenizerSpec, load_tokenizer


def hf_tokenizer_files(spec: TokenizerSpec) -> dict[str, bytes]:
    """Contents by file name. A SentencePiece model has no such files: transformers reads the model itself."""
    tokenizer = load_tokenizer(spec)
    if isinstance(tokenizer, FastTokenizer):
        fast = tokenizer.tokenizer
    elif isinstance(tokenizer, ByteTokenizer):
        fast = byte_tokenizer()
    else:
        return {}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    generation: dict[str, Any] = {}
    if tokenizer.end_id is not None:
        config["eos_token"], generation["eos_token_id"] = fast.id_to_token(tokenizer.end_id), tokenizer.end_id
    return {
        "tokenizer.json": fast.to_str(pretty=True).encode(),
        "tokenizer_config.json": _json(config),
        "generation_config.json": _json(generation),
    }


def byte_tokenizer() -> Fast:
    """A byte-level BPE without merges, whose ids are the bytes, and then the token that ends a document."""
    characters = bytes(range(256)).decode("latin-1").translate(byte_to_char())
    fast = Fast(models.BPE({character: byte for byte, character in enumerate(characters)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|endoftext|>"])
    return fast


def _json(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
