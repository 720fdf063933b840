"""Tokens per second of batches that mix adapters, next to the same batch of the base alone, in one process.

    python bench/adapter_serving.py [--device cpu|cuda] [--out bench/results/adapters-cpu.json]

Random adapters of rank 16 on all linear layers; prompts of 64 tokens, 128 new ones, greedy. The engines take turns: the
base without adapters; with 1 and with 4 adapters, which the sequences of a batch use in turn with the base; and one
that runs the adapter as part of the model (`generate --adapter`). cpu: a Llama of 15 million weights in fp32,
8 sequences. cuda: the shape of DeepSeek-Coder 1.3B in bf16, 32 sequences. The time includes the prompts.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from trainyard.checkpoint.weights import WeightSource, unfused_tensors
from trainyard.core.tensor_slice import TensorSlice
from trainyard.formats.peft.adapter import with_lora
from trainyard.formats.peft.write_adapter import write_adapter
from trainyard.formats.registry import open_weights
from trainyard.inference.load import InferenceModel, InferenceOptions, load_for_inference
from trainyard.inference.requests import Request, SamplingOptions

SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 6},
    "cuda": {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16},
}
VOCAB = 32000
BATCH = {"cpu": 8, "cuda": 32}
NEW_TOKENS, PROMPT = 128, 64
COUNTS = (1, 4)


class RandomAdapter:
    """Random values of an adapter of a model."""

    def __init__(self, base: WeightSource) -> None:
        self.model = with_lora(base.model, {"rank": 16, "alpha": 32.0})

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, piece: TensorSlice) -> torch.Tensor:
        assert piece.name in unfused_tensors(self.model)
        return torch.randn(piece.sizes) * 0.01


def tokens_per_second(model: InferenceModel, prompts: list[list[int]], adapters: int) -> float:
    """Of a batch whose sequences use the adapters and the base in turn."""
    begin, tokens = time.perf_counter(), 0
    for index, prompt in enumerate(prompts):
        options = SamplingOptions(max_new_tokens=NEW_TOKENS)
        model.scheduler.add(Request(index, prompt, options, index % (adapters + 1)))
    while model.scheduler.has_work:
        tokens += len(model.scheduler.step())
    return tokens / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = arguments.device
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPES[device], vocab_size=VOCAB, max_position_embeddings=2048)
    with tempfile.TemporaryDirectory() as directory:
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(f"{directory}/base")
        base = open_weights(f"{directory}/base").weights
        paths = {f"a{number}": f"{directory}/a{number}" for number in range(max(COUNTS))}
        for path in paths.values():
            write_adapter(Path(path), RandomAdapter(base), base=f"{directory}/base")

        def load(**adapters: Any) -> InferenceModel:
            options = InferenceOptions(device, max_batch=BATCH[device], max_seq_len=512, **adapters)
            return load_for_inference(f"{directory}/base", options)

        engines = {"base": (load(), 0), "adapter in the model": (load(adapter=paths["a0"]), 0)}
        for count in COUNTS:
            engines[f"{count} and the base, mixed"] = (load(adapters=dict(list(paths.items())[:count])), count)
        prompts = torch.randint(0, VOCAB, (BATCH[device], PROMPT)).tolist()
        found: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(arguments.rounds + 1):
            for name, (model, count) in engines.items():
                speed = tokens_per_second(model, prompts, count)
                found[name] += [speed] if turn else []  # the first one compiles
    medians = {name: statistics.median(speeds) for name, speeds in found.items()}
    cpu = f"{platform.machine()}, {torch.get_num_threads()} thread(s)"
    report = {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu,
        "torch": torch.__version__,
        "batch": BATCH[device],
        "tokens_per_s": {name: round(speed, 1) for name, speed in medians.items()},
        "ratio_to_base": {name: round(speed / medians["base"], 3) for name, speed in medians.items()},
    }
    print(json.dumps(report, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
