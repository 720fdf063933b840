"""Cost of parallelism on two CPU ranks with one thread each, in one run. All results are ratios; 1 is free.

    python bench/parallel.py [--rounds N] [--out FILE]

- zero1: a ZeRO-1 step over the same step with replicated optimizer state, on two ranks.
- ring: rank-seconds of attention over a sequence that two ranks share, over one rank doing all of it (forward and
  backward, causal); the same for gathered keys and values.
- bubble: the fraction of a pipeline's forward and backward passes in which a stage waits or sends instead of
  computing, over the theory, (pp - 1) / (m + pp - 1) for m micro batches; with v virtual stages m v instead of m.

Compared variants take turns, so that a slow moment of the machine hits all of them; medians count.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainyard import Config, Trainer
from trainyard.config.load import parse
from trainyard.launch.launcher import launch
from trainyard.parallel.context_parallel import ContextAxis
from trainyard.parallel.process_group import Group

RANKS = 2
MODEL = {"family": "llama", "vocab": 4096, "hidden": 256, "layers": 8, "heads": 8, "ffn": 704, "max_positions": 512}
# A tiny vocabulary, so that embedding and head cost nearly nothing and both pipeline stages have the same work.
BALANCED_MODEL = {**MODEL, "vocab": 64}
SEQUENCE = 256
MICRO_BATCHES = (2, 4, 8, 16)
HEADS, HEAD_DIM, LONG_SEQ_LEN = 4, 64, 8192


def make_config(model: dict[str, Any], layout: dict[str, Any], samples: int) -> Config:
    return parse(
        {
            "model": model,
            "data": {"source": "synthetic", "seq_len": SEQUENCE},
            "train": {"steps": 1, "global_batch": samples, "micro_batch": 2},
            "layout": layout,
            "device": {"name": "cpu", "threads": 1},
        }
    )


def make_step(config: Config) -> Callable[[], None]:
    trainer = Trainer(config)
    for model in trainer.models:
        model.train()
    batch = trainer.loader.batch(0, trainer.batch_slice)

    def step() -> None:
        trainer.train_step(batch, 1, 1e-4)
        trainer.optimizer.wait_for_weights()

    return step


def interleaved_medians(sides: dict[Any, Callable[[], None]], rounds: int, together: bool = True) -> dict[Any, float]:
    """Return the median seconds of each, run in turn; with `together`, all ranks start at the same time."""
    seconds: dict[Any, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 2):
        for name, run in sides.items():
            if together:
                dist.barrier()
            start = time.perf_counter()
            run()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def bench_zero1(rounds: int) -> dict[str, Any]:
    sides = {zero: make_step(make_config(MODEL, {"zero": zero, "bucket_mib": 4}, 8)) for zero in (0, 1)}
    found = interleaved_medians(sides, rounds)
    return {"replicated_ms": found[0] * 1e3, "zero1_ms": found[1] * 1e3, "ratio": found[1] / found[0]}


def bench_attention(rounds: int) -> dict[str, Any]:
    """Compare with one rank that does everything; both ranks do so at the same time, to keep both cores busy."""
    world = dist.group.WORLD
    assert world is not None
    group = Group(tuple(range(RANKS)), dist.get_rank(), world.group_name, world)

    def attention(tokens: int, run: Callable[..., torch.Tensor]) -> Callable[[], None]:
        q, k, v = (torch.randn(1, HEADS, tokens, HEAD_DIM, requires_grad=True) for _ in range(3))
        dout = torch.randn(1, HEADS, tokens, HEAD_DIM)
        return lambda: torch.autograd.backward(run(q, k, v), dout)

    def shared(method: Any) -> Callable[..., torch.Tensor]:
        axis = ContextAxis(group, method)
        return lambda q, k, v: axis.attend(q, k, v, True, None, None)

    sides = {
        "alone": attention(LONG_SEQ_LEN, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        "ring": attention(LONG_SEQ_LEN // RANKS, shared("ring")),
        "all_gather": attention(LONG_SEQ_LEN // RANKS, shared("all_gather")),
    }
    found = interleaved_medians(sides, rounds)
    return {
        **{f"{name}_ms": seconds * 1e3 for name, seconds in found.items()},
        "ring_ratio": RANKS * found["ring"] / found["alone"],
        "all_gather_ratio": RANKS * found["all_gather"] / found["alone"],
    }


class TimedPipeline:
    """A pipeline step that times the compute of its stages; the rest of the step is waiting."""

    def __init__(self, config: Config) -> None:
        self.trainer = Trainer(config)
        for model in self.trainer.models:
            model.train()
        self.batch = self.trainer.loader.batch(0, self.trainer.batch_slice)
        self.busy_s = self.total_s = 0.0
        self.bubble_fractions: list[float] = []
        pipeline = self.trainer.runner.pipeline
        assert pipeline is not None
        schedule = pipeline.schedule
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            for name in ("forward_one_chunk", "backward_one_chunk"):
                setattr(stage, name, self._timed(getattr(stage, name), "busy_s"))
        pipeline.run = self._timed(pipeline.run, "total_s")  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., Any], total: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **named)
            setattr(self, total, getattr(self, total) + time.perf_counter() - start)
            return result

        return timed

    def step(self) -> None:
        self.busy_s = self.total_s = 0.0
        self.trainer.train_step(self.batch, 1, 1e-4)
        seconds = torch.tensor([self.busy_s, self.total_s])
        dist.all_reduce(seconds)  # mean over the stages
        self.bubble_fractions.append(1 - float(seconds[0] / seconds[1]))


def bench_bubble(rounds: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for schedule, layout in {"1f1b": {"pp": RANKS}, "interleaved": {"pp": RANKS, "vpp": 2}}.items():
        watched = {m: TimedPipeline(make_config(BALANCED_MODEL, layout, 2 * m)) for m in MICRO_BATCHES}
        seconds = interleaved_medians({m: each.step for m, each in watched.items()}, rounds)
        rows = {}
        for m, each in watched.items():
            predicted = (RANKS - 1) / (m * layout.get("vpp", 1) + RANKS - 1)
            measured = statistics.median(each.bubble_fractions[-rounds:])
            ratio = measured / predicted
            rows[m] = {"ms": seconds[m] * 1e3, "predicted": predicted, "measured": measured, "ratio": ratio}
        out[schedule] = rows
    return out


def run_rank(rounds: int, out: Path | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {"torch": torch.__version__, "ranks": RANKS, "threads": 1, "rounds": rounds}
    results |= {"zero1": bench_zero1(rounds), "attention": bench_attention(rounds), "bubble": bench_bubble(rounds)}
    if dist.get_rank() == 0:
        print_results(results)
        if out:
            out.write_text(json.dumps(results, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def print_results(results: dict[str, Any]) -> None:
    zero, attention = results["zero1"], results["attention"]
    print(f"two ranks, one thread each, torch {results['torch']}, medians of {results['rounds']}")
    print(f"ZeRO-1 over replicated     {zero['ratio']:.2f}   ({zero['zero1_ms']:.0f} / {zero['replicated_ms']:.0f} ms)")
    for name in ("ring", "all_gather"):
        ratio, ms = attention[f"{name}_ratio"], attention[f"{name}_ms"]
        print(
            f"{name:10} over one rank  {ratio:.2f}   "
            f"(2 x {ms:.0f} / {attention['alone_ms']:.0f} ms, {LONG_SEQ_LEN} tokens)"
        )
    for schedule, found in results["bubble"].items():
        for m, row in found.items():
            print(
                f"{schedule:12} {m:2} micro batches: bubble {row['measured']:.3f}, predicted {row['predicted']:.3f}, "
                f"ratio {row['ratio']:.2f}   ({row['ms']:.0f} ms)"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the results to this file as JSON")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments.rounds, arguments.out)
    else:
        sys.exit(launch(sys.argv[1:], RANKS, command=[sys.executable, __file__]))


if __name__ == "__main__":
    main()
