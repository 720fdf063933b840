"""Tokens of conversations trained per second: packed samples against padded ones, in one process.

    python bench/packing_speed.py --case tiny|llama3.2-1b [--out FILE]

Lengths are those of a typical set of conversations: lognormal, 400 tokens on average, samples of 2,048 tokens. Both
train as many samples per step; only tokens of conversations count, not padding.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainyard import Trainer
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.data.loading.dataset import Dataset
from trainyard.data.loading.packing import document_samples

ROOT = Path(__file__).resolve().parents[1]
SEQ_LEN, MEAN, SIGMA, DOCUMENTS = 2048, 400, 0.9, 20_000
PAD_TOKEN = 0
CASES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model": {"vocab": 512, "hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 384},
        "train": {"global_batch": 2, "micro_batch": 1},
        "steps": 12,
    },
    "llama3.2-1b": {
        "model": {
            "vocab": 128_256,
            "hidden": 2048,
            "layers": 16,
            "heads": 32,
            "kv_heads": 8,
            "ffn": 8192,
            "tie_embeddings": True,
            "rope_theta": 500_000.0,
        },
        "train": {"global_batch": 16, "micro_batch": 8},
        "precision": {"kind": "bf16"},
        "steps": 12,
    },
}
WARMUP_STEPS = 3


class Conversations:
    """Random tokens, half of which are trained."""

    def __init__(self, vocab: int) -> None:
        drawn = np.random.default_rng(0).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, DOCUMENTS)
        self.lengths: NDArray[np.int32] = drawn.clip(16, SEQ_LEN).astype(np.int32)
        self.vocab = vocab

    def document(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        rng, length = np.random.default_rng(index), self.lengths[index]
        return rng.integers(1, self.vocab, length, dtype=np.int32), np.arange(length) % 100 >= 50

    def source(self, index: int) -> str:
        return f"document {index}"


def make_conversations(config: Config) -> Dataset:
    return document_samples(Conversations(config.model.vocab), config.data, PAD_TOKEN)


def measure(case: dict[str, Any], packing: bool) -> dict[str, float]:
    """Conversation tokens per second over the steps after the first ones."""
    sections = {key: value for key, value in case.items() if key not in ("model", "steps")}
    config = parse(
        {
            "model": {"family": "llama", "max_positions": SEQ_LEN, **case["model"]},
            "data": {"source": "bench.packing_speed:make_conversations", "seq_len": SEQ_LEN, "packing": packing},
            "log": {"loggers": []},
            **sections,
            "train": {**sections["train"], "steps": case["steps"]},
        }
    )
    trainer = Trainer(config)
    tokens, samples, start = 0, 0, 0.0
    for model in trainer.models:
        model.train()
    for step in range(case["steps"]):
        batch = trainer.loader.batch(step)
        if step == WARMUP_STEPS:
            start = time.perf_counter()
        result = trainer.train_step(batch, step + 1, 1e-4)
        float(result.loss)  # waits for the step
        if step >= WARMUP_STEPS:
            tokens += int((batch["tokens"] != PAD_TOKEN).sum())
            samples += len(batch["tokens"])
    seconds = time.perf_counter() - start
    trainer.optimizer.wait_for_weights()
    return {
        "tokens_per_s": round(tokens / seconds, 1),
        "sample_positions_per_s": round(samples * SEQ_LEN / seconds, 1),
        "filled": round(tokens / (samples * SEQ_LEN), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, default="tiny")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    packed, padded = (measure(CASES[options.case], packing) for packing in (True, False))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    results = {
        "case": options.case,
        "device": device,
        "torch": torch.__version__,
        "seq_len": SEQ_LEN,
        "mean_length": MEAN,
        "packed": packed,
        "padded": padded,
        "packed_over_padded": round(packed["tokens_per_s"] / padded["tokens_per_s"], 2),
    }
    print(json.dumps(results, indent=2))
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
