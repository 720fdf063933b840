"""Tokens per second of DPO with a precomputed reference next to fine-tuning on the same texts, in one process.

    python bench/dpo_speed.py --out bench/results/dpo-h200.json [--profile FILE]
    python bench/dpo_speed.py --tiny                                  shows that it works, on a CPU too

The shape of Llama 3.2 1B with random weights, bf16, all of them trained by AdamW. Texts are random tokens, 400 on
average (lognormal); each pair has two, which begin with one prompt, half as long as the shorter text. Fine-tuning
trains what follows the prompt of each text, DPO compares it. Both pack samples of 2,048 tokens, 8 per step, and load
them as a run does: a thread prepares the next batch. They take turns; speeds are medians of steps, and padding does not
count. `reference_tokens_per_s` is the speed of the scores that are computed before the first step.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from trainyard import Trainer
from trainyard.config.load import parse
from trainyard.core.batch import Batch
from trainyard.train.reference_scores import ReferenceScores, score_pairs

GPU = torch.cuda.is_available()
MEAN, SIGMA, PAIRS = 400, 0.9, 1500
PAD_TOKEN, END = 0, "<|end|>"
LR = 1e-6
WARMUP_STEPS, STEPS, ROUNDS = 4, 8, 3
LLAMA_1B = {
    "family": "llama", "vocab": 128_256, "hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192,
    "max_positions": 8192, "rope_theta": 500_000.0, "tie_embeddings": True,
}  # fmt: skip
TINY = {
    "family": "llama", "vocab": 512, "hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 256,
    "max_positions": 2048,
}  # fmt: skip


def write_data(directory: Path, vocab: int, longest: int) -> dict[str, dict[str, Any]]:
    """A tokenizer with a word for each token, and the data sections of both runs."""
    words = {"<|pad|>": PAD_TOKEN, END: 1, **{f"w{index}": index for index in range(2, vocab)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token=END))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(directory / "tokenizer.json"))
    rng, mean = np.random.default_rng(0), min(MEAN, longest // 4)
    drawn = rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, (PAIRS, 2)).clip(16, longest - 2).astype(int)

    def text(length: int) -> str:
        return "".join(f"w{token} " for token in rng.integers(2, vocab, length))

    with (directory / "texts.jsonl").open("w") as texts, (directory / "pairs.jsonl").open("w") as pairs:
        for lengths in drawn:
            prompt, *answers = map(text, (lengths.min() // 2, *(lengths - lengths.min() // 2)))
            pairs.write(json.dumps(dict(zip(("prompt", "chosen", "rejected"), (prompt, *answers), strict=True))) + "\n")
            texts.writelines(json.dumps({"prompt": prompt, "completion": answer}) + "\n" for answer in answers)
    common = {
        "tokenizer": str(directory / "tokenizer.json"),
        "end_of_text": END,
        "packing": True,
        "seq_len": 2 * longest,
    }
    return {
        "sft": {"source": "chat", "paths": [str(directory / "texts.jsonl")], **common},
        "dpo": {"source": "preference", "paths": [str(directory / "pairs.jsonl")], **common},
    }


class Case:
    """A run that takes as many steps as it is asked for."""

    def __init__(self, data: dict[str, Any], steps: int, tiny: bool, overrides: list[str]) -> None:
        batch = 2 if tiny else 8
        objective = {"objective": "dpo"} if data["source"] == "preference" else {}
        config = parse(
            {
                "model": TINY if tiny else LLAMA_1B,
                "precision": {"kind": "bf16"},
                "log": {"loggers": []},
                "data": data,
                "train": {"steps": steps, "global_batch": batch, "micro_batch": batch, **objective},
            },
            overrides,
        )
        self.trainer = trainer = Trainer(config)
        self.result: dict[str, float] = {}
        if config.train.objective:
            self._score_reference()
        for model in trainer.models:
            model.train()
        self.counts: list[int] = []
        self.batches = self._batches(steps)
        self.times: list[float] = []
        self.step = 0
        self.last_loss = float("nan")

    def _score_reference(self) -> None:
        """As `prepare_reference` does, without a file; the time is that of the batches after the first ones."""
        trainer, scores = self.trainer, ReferenceScores()
        trainer.runner.add_reference = None
        batches = [trainer.loader.batch(step) for step in range(trainer.config.train.steps)]
        start = 0.0
        for count, _ in enumerate(score_pairs(trainer.runner, trainer.loss_fn, scores, batches), 1):  # type: ignore[arg-type]
            if count in (WARMUP_STEPS, len(batches)):
                trainer.device.synchronize()
            if count == WARMUP_STEPS:
                start = time.perf_counter()
        tokens = sum(map(count_tokens, batches[WARMUP_STEPS:]))
        self.result["reference_tokens_per_s"] = tokens / (time.perf_counter() - start)
        trainer.runner.add_reference = scores.attach

    def _batches(self, steps: int) -> Iterator[list[Batch]]:
        def prepare(batch: Batch) -> tuple[int, list[Batch]]:
            return count_tokens(batch), self.trainer.runner.stage_batch(batch)

        for count, staged in self.trainer.loader.prefetch(0, steps, self.trainer.batch_slice, prepare):
            self.counts.append(count)
            yield staged

    def take_steps(self, count: int) -> None:
        for _ in range(count):
            start = time.perf_counter()
            self.step += 1
            result = self.trainer.train_step(next(self.batches), self.step, LR)
            self.last_loss = float(result.loss)  # waits for the step
            self.times.append(time.perf_counter() - start)

    def summary(self) -> dict[str, float]:
        rates = [tokens / seconds for tokens, seconds in zip(self.counts, self.times, strict=True)][WARMUP_STEPS:]
        samples = self.trainer.config.train.global_batch * self.trainer.config.data.seq_len
        filled = sum(self.counts) / (samples * len(self.counts))
        found = {"tokens_per_s": statistics.median(rates), "slowest": min(rates), "fastest": max(rates)}
        return {**found, "filled": filled, "last_loss": self.last_loss, **self.result}


def count_tokens(batch: Batch) -> int:
    return int((batch["tokens"] != PAD_TOKEN).sum())


def profile_step(case: Case) -> str:
    """A table of the kernels of a step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA if GPU else ProfilerActivity.CPU]) as traced:
        case.take_steps(1)
    key = "self_device_time_total" if GPU else "self_cpu_time_total"
    return str(traced.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=90))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="keys of both runs")
    parser.add_argument("--profile", type=Path, help="write tables of the kernels of a step")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    steps = WARMUP_STEPS + ROUNDS * STEPS + bool(options.profile)
    with tempfile.TemporaryDirectory() as directory:
        data = write_data(Path(directory), (TINY if options.tiny else LLAMA_1B)["vocab"], 128 if options.tiny else 1024)
        cases = {name: Case(each, steps, options.tiny, options.set) for name, each in data.items()}
    for count in (WARMUP_STEPS, *[STEPS] * ROUNDS):
        for case in cases.values():
            case.take_steps(count)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if GPU else platform.machine(),
        "torch": torch.__version__,
        "set": options.set,
        **{name: {key: round(value, 4) for key, value in case.summary().items()} for name, case in cases.items()},
    }
    results["ratio"] = round(results["dpo"]["tokens_per_s"] / results["sft"]["tokens_per_s"], 3)
    if GPU:
        results["peak_gib_of_both"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    print(json.dumps(results, indent=1))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    if options.profile:
        options.profile.write_text("".join(f"{name}\n{profile_step(case)}\n" for name, case in cases.items()))


if __name__ == "__main__":
    main()
