"""Tokens per second of `trainyard generate`'s engine next to transformers' generate, on the same weights in one run.

    python bench/generate.py [--device cpu|cuda] [--out bench/results/generate-cpu.json]

cpu: a Llama of 15 million weights in fp32, prompts of 64 tokens. cuda: the shape of DeepSeek-Coder 1.3B in bf16,
prompts of 512 tokens. Greedy, random weights and prompts, no end token. Decode speed leaves out the time to the first
token. transformers runs eagerly and, on a GPU, also with its static cache and torch.compile. On the CPU the tokens of
both must be equal. In bf16, texts part where two logits are nearly equal: those of trainyard must agree with eager
transformers for at least half as many tokens as those of compiled transformers do.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from trainyard.inference.load import InferenceModel, InferenceOptions, load_for_inference
from trainyard.inference.requests import Request, SamplingOptions

SMALL = {
    "hidden_size": 288,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}
DEEPSEEK_1B = {
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32256,
    "tie_word_embeddings": False,
}
NEW_TOKENS = 128


def agreement(texts: list[list[int]], others: list[list[int]]) -> float:
    """How many tokens texts have in common before they part, on average."""
    lengths = []
    for text, other in zip(texts, others, strict=True):
        pairs = zip(text, other, strict=True)
        lengths.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(text)))
    return statistics.mean(lengths)


class Timing:
    """Medians over rounds."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.seconds: list[float] = []
        self.first: list[float] = []

    def summary(self) -> dict[str, float]:
        seconds, first = statistics.median(self.seconds), statistics.median(self.first)
        return {
            "decode_tokens_per_s": round(self.batch * (NEW_TOKENS - 1) / (seconds - first), 1),
            "tokens_per_s": round(self.batch * NEW_TOKENS / seconds, 1),
            "first_token_ms": round(first * 1e3, 2),
        }


def run_ours(model: InferenceModel, prompts: torch.Tensor) -> tuple[list[list[int]], float, float]:
    """Tokens, seconds, and seconds to the first token of all sequences."""
    options = SamplingOptions(max_new_tokens=NEW_TOKENS)
    begin, first = time.perf_counter(), 0.0
    for index, prompt in enumerate(prompts.tolist()):
        model.scheduler.add(Request(index, prompt, options))
    tokens: list[list[int]] = [[] for _ in prompts]
    while model.scheduler.has_work:
        for event in model.scheduler.step():
            tokens[event.request_id].append(event.token)
        if not first and all(tokens):
            first = time.perf_counter() - begin
    return tokens, time.perf_counter() - begin, first


class Transformers:
    """transformers' generate with the given arguments."""

    def __init__(self, model: Any, **arguments: Any) -> None:
        self.model = model
        self.arguments = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **arguments}

    @torch.no_grad()
    def run(self, prompts: torch.Tensor, new_tokens: int) -> tuple[list[list[int]], float]:
        begin = time.perf_counter()
        output = self.model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new_tokens, **self.arguments
        )
        tokens = output[:, prompts.shape[1] :].tolist()
        return tokens, time.perf_counter() - begin


def measure(
    device: str, batches: list[int], rounds: int, prompt_length: int, shape: dict[str, Any]
) -> list[dict[str, Any]]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape, max_position_embeddings=2048)
    with torch.device(device):
        theirs = transformers.LlamaForCausalLM(config).to(dtype).eval()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        # `to(bfloat16)` has rounded the inverse frequencies of RoPE, too, which from_pretrained keeps in fp32
        theirs = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
        for batch in batches:
            prompts = torch.randint(0, shape["vocab_size"], (batch, prompt_length), device=device)
            options = InferenceOptions(device, max_batch=batch, max_seq_len=1024, compiled=device == "cpu")
            ours = {"trainyard": load_for_inference(directory, options)}
            if device == "cuda":
                ours["trainyard, fp8 weights"] = load_for_inference(directory, replace(options, fp8_weights=True))
            peers = {"transformers": Transformers(theirs)}
            if device == "cuda":
                peers["transformers, static cache, compiled"] = Transformers(theirs, cache_implementation="static")
            timings = {name: Timing(batch) for name in (*ours, *peers)}
            for model in ours.values():
                run_ours(model, prompts)  # compile, capture, tune
            for peer in peers.values():
                for new_tokens in (1, NEW_TOKENS, NEW_TOKENS):
                    peer.run(prompts, new_tokens)
            texts = {}
            for _ in range(rounds):  # turn by turn, so that a change of the clock hits all
                for name, model in ours.items():
                    texts[name], seconds, first = run_ours(model, prompts)
                    timings[name].seconds.append(seconds)
                    timings[name].first.append(first)
                for name, peer in peers.items():
                    texts[name], seconds = peer.run(prompts, NEW_TOKENS)
                    timings[name].seconds.append(seconds)
                    timings[name].first.append(peer.run(prompts, 1)[1])
            agreed = {name: agreement(text, texts["transformers"]) for name, text in texts.items()}
            for name, timing in timings.items():
                rows.append({"batch": batch, "system": name, **timing.summary(), "agrees_for_tokens": agreed[name]})
                print(rows[-1], flush=True)
            needed = NEW_TOKENS if device == "cpu" else agreed["transformers, static cache, compiled"] / 2
            if agreed["trainyard"] < needed:
                raise SystemExit(f"the texts agree for {agreed['trainyard']:.1f} tokens, not {needed:.1f}")
            del ours
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batches", type=int, nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.device == "cpu":
        rows = measure("cpu", arguments.batches or [1, 8], arguments.rounds, 64, SMALL)
    else:
        rows = measure("cuda", arguments.batches or [1, 32], arguments.rounds, 512, DEEPSEEK_1B)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    device_name = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{arguments.threads} CPU threads"
    result = {"device": device_name, **versions, "new_tokens": NEW_TOKENS, "rows": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
