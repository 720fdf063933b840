"""Effect of low precision and fused kernels on the loss: complete runs on the same text, compared step by step.

    python bench/numerics.py fast    bf16 with fused kernels against fp32 in plain torch: 200 steps, gradients of step 1
                                     (control: fp32 in plain torch, the batch in two halves: only rounding differs)
    python bench/numerics.py fp8     fp8 (per tensor, per row) against bf16: 500 steps

The text is the Python sources installed with torch, which every machine has; the tokenizer is trained on it. All runs
see the same samples in the same order and start from the same weights.
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
from trainyard.run.callbacks import Callback, TrainerView
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
        "fp32, plain, two halves": {"precision": {"kind": "fp32"}, "device": {"kernels": "plain"}, "micro_batches": 2},
    },
    "fp8": {
        "bf16": {"precision": {"kind": "bf16"}},
        "fp8 per tensor": {"precision": {"kind": "fp8"}},
        "fp8 per row": {"precision": {"kind": "fp8", "fp8_scaling": "row"}},
    },
}


def write_corpus(directory: Path, size: int) -> list[str]:
    """Write and return files of Python source, about `size` characters in total."""
    package = Path(torch.__file__).parent
    texts: list[str] = []
    for file in sorted(package.rglob("*.py")):
        texts.append(file.read_text(errors="ignore"))
        if sum(map(len, texts)) > size:
            break
    for number, text in enumerate(texts):
        (directory / f"{number:05}.txt").write_text(text)
    return texts


def train_tokenizer(texts: list[str], file: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:400], trainer)
    tokenizer.save(str(file))


class FirstGradients(Callback):
    """Keeps the reduced gradients of the first step."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_gradients_ready(self, trainer: TrainerView) -> None:
        if not self.gradients:
            state = trainer.optimizer.state
            views = {name: state.shard_view(state.reduced_grads, name) for name in state.names}
            self.gradients = {name: view.float().cpu() for name, view in views.items()}


def train_variant(
    what: str, sections: dict[str, Any], directory: Path, steps: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Train; returns the losses of all steps and the gradients of the first."""
    batch_size, seq_len = arguments.batch, arguments.seq_len
    sections = dict(sections)
    micro_batch = batch_size // sections.pop("micro_batches", 1)
    settings = {
        "model": {"family": "llama", "vocab": VOCAB, "max_positions": seq_len, **SHAPE[what]},
        "data": {
            "paths": [str(directory / "*.txt")],
            "tokenizer": str(directory / "tokenizer.json"),
            "end_of_text": "<|endoftext|>",
            "seq_len": seq_len,
        },
        "train": {"steps": steps, "global_batch": batch_size, "micro_batch": micro_batch},
        "optimizer": {"lr": 3e-4},
        "schedule": {"warmup_steps": arguments.warmup, "min_lr": 3e-5},
        "checkpoint": {"export_hf": False},
        **sections,
    }
    recorder = FirstGradients()
    trainer = Trainer(parse(settings), callbacks=[recorder])
    losses = []
    for model in trainer.models:
        model.train()
    for step in range(1, steps + 1):
        batch = trainer.loader.batch(step - 1)
        losses.append(trainer.train_step(batch, step, learning_rate(trainer.config, step)).loss)
    return {
        "losses": torch.stack(losses).tolist(),
        "gradients": recorder.gradients,
        "device": trainer.device.describe(),
    }


def moving_average(losses: list[float], over: int = 20) -> list[float]:
    """Return means of the last `over` steps: the noise of a batch is the same in all runs, drift is not."""
    return [sum(losses[max(0, n - over + 1) : n + 1]) / min(over, n + 1) for n in range(len(losses))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=sorted(VARIANTS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--seq-len", type=int, default=1024)
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
        "batch": [arguments.batch, arguments.seq_len],
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
            f"{label}: loss -> {moving_average(other['losses'])[-1]:.4f}; largest difference of a step "
            f"{max(apart):.3%}, of the mean of 20 {max(apart_smooth):.3%}, at the end {apart_smooth[-1]:.3%}; gradient "
            f"cosine at step 1 {row['gradient_cosine']:.6f}, least {cosines[least]:.6f} ({least})"
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
