"""What low precision and fused kernels cost in loss: curves of whole runs on the same text, compared step by step.

    python bench/numerics.py fast    bf16 with fused kernels against fp32 in plain torch: 200 steps, gradients of step 1
                                     (and fp32 in plain torch once more, its batch in two halves: rounding alone)
    python bench/numerics.py fp8     fp8 (by tensor, by row) against bf16: 500 steps

Text: the Python sources that are installed beside torch, a real text that every machine has; the tokenizer is trained
on it. All runs see the same samples in the same order from the same weights.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from trainyard import Trainer
from trainyard.config.load import parse
from trainyard.train.optim.lr_schedule import learning_rate

VOCAB = 8192
SHAPE = {
    "fast": {"hidden": 768, "layers": 12, "heads": 6, "ffn": 2048},
    "fp8": {"hidden": 1024, "layers": 12, "heads": 8, "ffn": 2816},
}
STEPS = {"fast": 200, "fp8": 500}
VARIANTS = {
    "fast": {
        "fp32, plain": {"precision": {"kind": "fp32"}, "device": {"kernels": "plain"}},
        "bf16, fused": {"precision": {"kind": "bf16"}},
        "fp32, plain, in halves": {"precision": {"kind": "fp32"}, "device": {"kernels": "plain"}, "micro_batches": 2},
    },
    "fp8": {
        "bf16": {"precision": {"kind": "bf16"}},
        "fp8 by tensor": {"precision": {"kind": "fp8"}},
        "fp8 by row": {"precision": {"kind": "fp8", "fp8_scaling": "row"}},
    },
}


def write_corpus(directory: Path, size: int) -> list[str]:
    """Files of Python source, about `size` characters in all."""
    package = Path(torch.__file__).parent
    pieces: list[str] = []
    for file in sorted(package.rglob("*.py")):
        pieces.append(file.read_text(errors="ignore"))
        if sum(map(len, pieces)) > size:
            break
    for number, piece in enumerate(pieces):
        (directory / f"{number:05}.txt").write_text(piece)
    return pieces


def train_tokenizer(pieces: list[str], file: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(pieces[:400], trainer)
    made.save(str(file))


def train_variant(
    what: str, sections: dict[str, Any], directory: Path, steps: int, given: argparse.Namespace
) -> dict[str, Any]:
    """Losses of all steps, and gradients of the first."""
    batch, sequence = given.batch, given.sequence
    sections = dict(sections)
    micro_batch = batch // sections.pop("micro_batches", 1)
    settings = {
        "model": {"family": "llama", "vocab": VOCAB, "max_positions": sequence, **SHAPE[what]},
        "data": {
            "paths": [str(directory / "*.txt")],
            "tokenizer": str(directory / "tokenizer.json"),
            "end_of_text": "<|endoftext|>",
            "seq_len": sequence,
        },
        "train": {"steps": steps, "global_batch": batch, "micro_batch": micro_batch},
        "optimizer": {"lr": 3e-4},
        "schedule": {"warmup_steps": given.warmup, "min_lr": 3e-5},
        "checkpoint": {"export_hf": False},
        **sections,
    }
    trainer = Trainer(parse(settings))
    first: dict[str, torch.Tensor] = {}
    optimizer = trainer.optimizer

    def look() -> None:
        first.update(
            {name: optimizer.state.shard_view(optimizer.state.reduced_grads, name).float().cpu() for name in optimizer.state.names}
        )
        trainer.train_step.on_gradients_ready = None

    trainer.train_step.on_gradients_ready = look
    losses = []
    for model in trainer.models:
        model.train()
    for number in range(1, steps + 1):
        losses.append(
            trainer.train_step(trainer.loader.batch(number - 1), number, learning_rate(trainer.config, number)).loss
        )
    return {"losses": torch.stack(losses).tolist(), "gradients": first, "device": trainer.device.describe()}


def moving_average(losses: list[float], over: int = 20) -> list[float]:
    """Means of the last `over` steps: a batch's own noise is the same in all runs, but drift is not."""
    return [sum(losses[max(0, n - over + 1) : n + 1]) / min(over, n + 1) for n in range(len(losses))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=sorted(VARIANTS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--characters", type=int, default=12_000_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    steps = arguments.steps or STEPS[arguments.what]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        train_tokenizer(write_corpus(directory, arguments.characters), directory / "tokenizer.json")
        found = {
            label: train_variant(arguments.what, sections, directory, steps, arguments)
            for label, sections in VARIANTS[arguments.what].items()
        }
    reference, *others = found
    base = found[reference]
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "device": base["device"],
        "shape": SHAPE[arguments.what],
        "batch": [arguments.batch, arguments.sequence],
        "warmup": arguments.warmup,
        "reference": reference,
        "losses": {label: run["losses"] for label, run in found.items()},
        "compared": {},
    }
    print(f"{reference}: loss {base['losses'][0]:.4f} -> {moving_average(base['losses'])[-1]:.4f} in {steps} steps")
    for label in others:
        other = found[label]
        apart = [abs(a / b - 1) for a, b in zip(other["losses"], base["losses"], strict=True)]
        apart_smooth = [
            abs(a / b - 1) for a, b in zip(moving_average(other["losses"]), moving_average(base["losses"]), strict=True)
        ]
        dots = [
            sum(float((x[name].double() * y[name].double()).sum()) for name in base["gradients"])
            for x, y in (
                (other["gradients"], base["gradients"]),
                (other["gradients"], other["gradients"]),
                (base["gradients"], base["gradients"]),
            )
        ]
        cosines = {
            name: float(torch.cosine_similarity(other["gradients"][name].flatten(), g.flatten(), 0))
            for name, g in base["gradients"].items()
        }
        least = min(cosines, key=lambda name: cosines[name])
        row = {
            "largest_difference": max(apart),
            "largest_smoothed_difference": max(apart_smooth),
            "final_smoothed_difference": apart_smooth[-1],
            "gradient_cosine": dots[0] / math.sqrt(dots[1] * dots[2]),
            "least_gradient_cosine": [least, cosines[least]],
        }
        result["compared"][label] = row
        print(
            f"{label}: loss -> {moving_average(other['losses'])[-1]:.4f}; largest difference of a step {max(apart):.3%}, "
            f"of the mean of 20 {max(apart_smooth):.3%}, at the end {apart_smooth[-1]:.3%}; gradient cosine at step 1 "
            f"{row['gradient_cosine']:.6f}, least {cosines[least]:.6f} ({least})"
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
