"""What watching a run costs: spans, and all logging, on a smoke run of a CPU.

    python bench/watch.py [--rounds 1500] [--out bench/results/watch-cpu.json]

One long run of the real Trainer changes at every step what it logs, in random order: nothing, nothing again (which
shows the noise), spans, or everything (spans, metrics.jsonl, TensorBoard and a line on the console). A round is one
step of each kind. The cost is the median over rounds of the difference to the step without logging in the same round,
in CPU time of the process and in wall time. Longer blocks, and runs that alternate, differ by 5 % and more on a machine
that others use too. "All logging" is the cost of spans at every step and of a logged step at every LOG_EVERY steps, the
default. The cost of one span is also measured directly, in a loop, and multiplied by the number of spans of a step;
inside a step, where the caches are cold, it is several times higher.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from trainyard import Trainer
from trainyard.cli.run_config import load_run_config
from trainyard.cli.train_console import TrainConsole
from trainyard.metrics.span_recorder import SpanRecorder
from trainyard.metrics.spans import NAMES, SpanHeader, read_spans, span_path
from trainyard.run.run_spans import RunSpans

LOG_EVERY = 10
WARM_UP_ROUNDS = 20
SMOKE = [
    *("checkpoint.every=0", "checkpoint.every_minutes=0", "checkpoint.export_hf=false", "evaluate.every=0"),
    *("device.name=cpu", "device.threads=1", "log.name=run", "log.loggers=[tensorboard]", "log.spans=true"),
]
KINDS = ("nothing", "nothing again", "spans", "everything")
BARS = {"spans": 0.005, "all logging": 0.01}
Times = dict[str, list[tuple[float, float]]]
"""CPU and wall milliseconds of the steps of each kind."""


class NoSpans(SpanRecorder):
    """Stands for a trainer that does not know spans."""

    context = nullcontext()

    def __call__(self, name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        return self.context

    def begin_step(self, step: int, logged: bool = False) -> None:
        return

    def end_step(self) -> None:
        return


class SwitchingTrainer(Trainer):
    """Changes what it logs at every step, and measures the steps."""

    def prepare(self, order: list[str]) -> None:
        """`order` is the kind of each step."""
        self.order, self.recorder, self.no_spans = order, self.spans, NoSpans()
        self.clocks: list[tuple[float, float]] = []

    def _log_due(self, step: int) -> bool:
        """Called before each step; what is logged about a step follows it."""
        kind = self.order[step - 1]
        spans = self.no_spans if kind.startswith("nothing") else self.recorder
        self.spans = self.runner.spans = self.train_step.spans = spans
        if run_spans := self.part(RunSpans):
            run_spans.recorder = spans
        self.clocks.append((time.process_time(), time.perf_counter()))
        return kind == "everything"


def measure_steps(directory: Path, order: list[str]) -> Times:
    """Train, with one step of each kind in `order`."""
    steps = [*order, "everything"]  # the last one ends the measurement
    overrides = [*SMOKE, f"log.directory={json.dumps(str(directory))}", f"train.steps={len(steps)}"]
    config = load_run_config("tiny-llama", overrides, smoke=True, ranks=1)
    with open(os.devnull, "w") as null:
        trainer = SwitchingTrainer(config, callbacks=[TrainConsole(Console(file=null))])
        trainer.prepare(steps)
        trainer.run()
    times: Times = {kind: [] for kind in KINDS}
    for kind, (before, after) in zip(order, pairwise(trainer.clocks), strict=True):
        times[kind].append((1000 * (after[0] - before[0]), 1000 * (after[1] - before[1])))
    return {kind: values[WARM_UP_ROUNDS:] for kind, values in times.items()}


def span_cost_us(directory: Path, count: int = 50_000) -> float:
    """Microseconds of one span, with the work of the thread that writes it."""
    directory.mkdir()
    recorder = SpanRecorder()
    recorder.open(directory / "spans" / "rank-00000.spans", SpanHeader(0, "host", NAMES, 0))
    start = time.process_time()
    for step in range(count // 10):
        recorder.begin_step(step)
        for _ in range(9):
            with recorder("forward"):
                pass
        recorder.end_step()
    recorder.close()
    return 1e6 * (time.process_time() - start) / count


def median_cost(times: Times, kind: str, clock: int) -> tuple[float, float, float]:
    """Median milliseconds that a step of `kind` takes longer, and the ends of its confidence interval of 95 %."""
    differences = sorted(
        after[clock] - before[clock] for before, after in zip(times["nothing"], times[kind], strict=True)
    )
    middle, spread = len(differences) // 2, int(0.98 * len(differences) ** 0.5) + 1  # order statistics
    low, high = max(middle - spread, 0), min(middle + spread, len(differences) - 1)
    return statistics.median(differences), differences[low], differences[high]


def summarize(times: Times) -> dict[str, Any]:
    """Costs by clock, as fractions of a step without logging."""
    result: dict[str, Any] = {}
    for clock, name in enumerate(("cpu", "wall")):
        step = statistics.median(values[clock] for values in times["nothing"])
        spans = [value / step for value in median_cost(times, "spans", clock)]
        everything = [value / step for value in median_cost(times, "everything", clock)]
        total = [
            at_every_step + max(logged - at_every_step, 0) / LOG_EVERY
            for at_every_step, logged in zip(spans, everything, strict=True)
        ]
        noise = [value / step for value in median_cost(times, "nothing again", clock)]
        result[name] = {
            "step_ms": step,
            "nothing again": noise,
            "spans": spans,
            "all logging": total,
            "a logged step": everything,
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = random.Random(0)
    order = [kind for _ in range(arguments.rounds) for kind in generator.sample(KINDS, len(KINDS))]
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        costs = summarize(measure_steps(directory, order))
        span_us = statistics.median(span_cost_us(directory / str(index)) for index in range(9))
        spans = read_spans(span_path(directory / "run", 0), 0)
        assert spans
        per_step = len(spans.records) / len(spans.named("step"))
    computed = span_us * per_step / 1000 / costs["cpu"]["step_ms"]
    result = {
        "rounds": arguments.rounds,
        "log_every": LOG_EVERY,
        "span_us": span_us,
        "spans_per_step": per_step,
        "spans_computed": computed,
        **costs,
    }
    print(f"a span: {span_us:.2f} us; {per_step:.1f} of them in a step are {computed:.3%} of it")
    for clock, values in costs.items():
        print(f"{clock} time, a step without logging takes {values['step_ms']:.2f} ms")
        for name in ("nothing again", "spans", "all logging", "a logged step"):
            median, low, high = values[name]
            bar = f", bar {BARS[name]:.1%}" if name in BARS else ""
            print(f"  {name:<14}{median:+.2%} (95 %: {low:+.2%} to {high:+.2%}){bar}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    missed = [name for name, bar in BARS.items() if costs["cpu"][name][0] >= bar]
    raise SystemExit(f"above the bar: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
