"""The time of a GRPO step on one GPU: trainyard next to TRL with transformers' own generation, in one run.

    python bench/grpo_speed.py --out bench/results/grpo-h200.json      every case, each in its own process
    python bench/grpo_speed.py --tiny                                  shows that it works, on a CPU too

The shape of DeepSeek-Coder 1.3B with random weights, bf16. A step: 32 prompts of 128 random tokens, 8 completions of
512 tokens each (no token ends one), a reward in Python, one update by AdamW; no reference. Times are medians of the
steps after the first one, which has short completions; `rollout_s` ends when the rewards are known, `update_s` is the
rest.

trainyard keeps fp32 master weights and samples from the weights that it trains. TRL trains bf16 weights with torch's
fused AdamW, without recomputing activations, in micro batches as given, with Liger's kernels if they can be imported.
It generates with a static cache, or with a dynamic one (its default), in memory that torch can extend
(`expandable_segments`) or not, or with transformers' continuous batching. TRL turns compiling off for these caches.
`ratios` has the step of each case over ours.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

ROOT = Path(__file__).resolve().parents[1]
GPU = torch.cuda.is_available()
WARMUP_STEPS, WARMUP_TOKENS = 1, 8
"""TRL's first step has short completions. The first one of trainyard captures graphs, of which there is one for all
lengths."""
DEEPSEEK = {
    "family": "llama", "vocab": 32_256, "hidden": 2048, "layers": 24, "heads": 16, "ffn": 5504,
    "max_positions": 16_384, "rope_theta": 100_000.0,
}  # fmt: skip
TINY = {
    "family": "llama", "vocab": 512, "hidden": 64, "layers": 2, "heads": 4, "ffn": 128, "max_positions": 2048,
}  # fmt: skip
PAD, END = "<|pad|>", "<|end|>"
LR = 1e-6
OURS = "trainyard"
PEERS: dict[str, dict[str, Any]] = {
    "trl, static cache": {"cache_implementation": "static"},
    "trl, dynamic cache, expandable": {},
    "trl, dynamic cache": {},
    "trl, continuous batching": {"use_transformers_continuous_batching": True},
}


def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """How many words of a completion begin like the numbers up to 4."""
    return [sum(word < "w5" for word in text.split()) / 100 for text in completions]


def write_data(directory: Path, vocab: int, prompts: int, length: int) -> None:
    """A tokenizer with a word for each token, and prompts. TRL gets an end token that the model does not have."""
    from transformers import PreTrainedTokenizerFast

    words = {PAD: 0, **{f"w{index}": index for index in range(1, vocab)}}
    for name, known in (("ours", words), ("theirs", {**words, END: vocab})):
        tokenizer = Tokenizer(WordLevel(known, unk_token=PAD))
        tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
        end = {"eos_token": END} if name == "theirs" else {}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, **end).save_pretrained(directory / name)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, vocab, (prompts, length), generator=generator).tolist()
    lines = (json.dumps({"prompt": " ".join(f"w{token}" for token in row)}) for row in tokens)
    (directory / "prompts.jsonl").write_text("\n".join(lines) + "\n")


class Clock:
    """Seconds of parts of a step, when the device is done."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.start = time.perf_counter()

    def begin_step(self) -> None:
        self.synchronize()
        self.steps.append({"rollout": 0.0})
        self.start = time.perf_counter()

    def end_step(self) -> None:
        self.synchronize()
        self.steps[-1]["step"] = time.perf_counter() - self.start

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts as rollout."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.synchronize()
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.synchronize()
            self.steps[-1]["rollout"] += time.perf_counter() - start
            return result

        return call

    def synchronize(self) -> None:
        if GPU:
            torch.cuda.synchronize()

    def summary(self) -> dict[str, float]:
        steps = self.steps[WARMUP_STEPS:]
        step, rollout = (statistics.median(each[name] for each in steps) for name in ("step", "rollout"))
        update = statistics.median(each["step"] - each["rollout"] for each in steps)
        return {"step_s": step, "rollout_s": rollout, "update_s": update, "slowest_s": max(s["step"] for s in steps)}


def run_ours(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from trainyard import Trainer
    from trainyard.config.load import parse
    from trainyard.run.rollouts.rollout_loader import prepare_rollouts

    rows, clock = options.prompts * options.completions, Clock()
    config = parse(
        {
            "model": options.shape,
            "precision": {"kind": "bf16"},
            "log": {"loggers": []},
            "data": {
                "source": "prompts",
                "paths": [str(directory / "prompts.jsonl")],
                "tokenizer": str(directory / "ours"),
                "end_of_text": "w1",
                "seq_len": options.prompt_tokens + options.new_tokens,
            },
            "train": {
                "objective": "grpo",
                "steps": WARMUP_STEPS + options.steps,
                "global_batch": rows,
                "micro_batch": options.our_micro_batch,
            },
            "rollout": {
                "rewards": ["bench.grpo_speed:reward"],
                "completions": options.completions,
                "max_new_tokens": options.new_tokens,
                "max_batch": rows,
            },
        },
        options.set,
    )
    trainer = Trainer(config)
    loader = prepare_rollouts(trainer)
    assert loader
    loader.completer.sampler.end_ids = frozenset()
    for model in trainer.models:
        model.train()
    loader.completer.complete = clock.timed(loader.completer.complete)  # type: ignore[method-assign]
    batches = loader.prefetch(0, config.train.steps, trainer.batch_slice, trainer.runner.stage_batch)
    for step in range(1, config.train.steps + 1):
        clock.begin_step()
        result = trainer.train_step(next(batches), step, LR)
        metrics = {name: float(value) for name, value in result.metrics.items()}
        clock.end_step()
    lengths = metrics["completions/length"]
    assert lengths == options.new_tokens, f"completions have {lengths} tokens on average"
    return {**clock.summary(), "micro_batch": options.our_micro_batch, **metrics}


def run_trl(case: dict[str, Any], options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    import transformers
    import trl
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    shape, clock, lengths = options.shape, Clock(), list[int]()
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["heads"],
        max_position_embeddings=shape["max_positions"], rope_theta=shape.get("rope_theta", 1e4),
        bos_token_id=None, eos_token_id=None, pad_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if GPU else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "theirs")
    prompts = [json.loads(line) for line in (directory / "prompts.jsonl").read_text().splitlines()]

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.begin_step()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.end_step()
            trainer.generation_config.max_new_tokens = options.new_tokens

    def measured_reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return reward(**columns)

    measured_reward.__name__ = "reward"

    rows = options.prompts * options.completions
    arguments = GRPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=rows // options.micro_batch,
        num_generations=options.completions,
        max_completion_length=WARMUP_TOKENS,
        max_steps=WARMUP_STEPS + options.steps,
        learning_rate=LR,
        beta=0.0,
        num_iterations=1,
        temperature=1.0,
        top_k=0,
        optim="adamw_torch_fused" if GPU else "adamw_torch",
        bf16=True,
        use_cpu=not GPU,
        gradient_checkpointing=False,
        use_liger_kernel=GPU and find_spec("liger_kernel") is not None,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        **case,
    )
    data = {"train_dataset": Dataset.from_list(prompts), "processing_class": tokenizer}
    trainer = GRPOTrainer(model, measured_reward, args=arguments, callbacks=[Steps()], **data)
    trainer._generate_and_score_completions = clock.timed(trainer._generate_and_score_completions)
    trainer.train()
    assert set(lengths[rows * WARMUP_STEPS :]) == {options.new_tokens}, (
        f"completions have {min(lengths)} to {max(lengths)} tokens"
    )
    versions = {each.__name__: each.__version__ for each in (trl, transformers)}
    return {**clock.summary(), "micro_batch": options.micro_batch, **versions}


def run_case(name: str, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One case in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", str(directory), "--case", name]
    memory = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if name.endswith("expandable") else {}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.timeout, env={**os.environ, **memory}
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {options.timeout} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:600]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[OURS, *PEERS], help="default: all")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=32, help="completions, of TRL")
    parser.add_argument("--our-micro-batch", type=int, default=32)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="keys of our configuration")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a case may take")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.shape = DEEPSEEK
    if options.tiny:
        options.shape, options.prompts, options.micro_batch, options.our_micro_batch = TINY, 4, 8, 8
        options.prompt_tokens, options.new_tokens = 8, 16
    if options.child:
        sys.path.insert(0, str(ROOT))
        name = options.case[-1]
        result = run_ours(options, options.child) if name == OURS else run_trl(PEERS[name], options, options.child)
        print(json.dumps({key: round(each, 4) if isinstance(each, float) else each for key, each in result.items()}))
        return
    device = torch.cuda.get_device_name() if GPU else platform.machine()
    results: dict[str, Any] = {"device": device, "torch": torch.__version__, "cases": {}}
    cases = results["cases"]
    with tempfile.TemporaryDirectory() as directory:
        steps = WARMUP_STEPS + options.steps
        write_data(Path(directory), options.shape["vocab"], options.prompts * steps, options.prompt_tokens)
        for name in options.case or [OURS, *PEERS]:
            cases[name] = run_case(name, options, Path(directory))
            print(f"{name:30} " + "  ".join(f"{key} {value}" for key, value in cases[name].items()), flush=True)
            times = {case: found["step_s"] for case, found in cases.items() if "step_s" in found}
            if OURS in times:
                results["ratios"] = {case: round(time / times[OURS], 2) for case, time in times.items() if case != OURS}
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    for name, ratio in results.get("ratios", {}).items():
        print(f"{name} / {OURS}: {ratio}")


if __name__ == "__main__":
    main()
