"""Measured memory of runs next to what `trainyard/preflight/plan/memory` predicts.

    python bench/plan_memory.py gpu --out FILE                 every case on one GPU, each in its own process
    python bench/plan_memory.py cpu --out FILE                 the same on a CPU, some with two or four ranks
    python bench/plan_memory.py gpu --case llama-full          only some cases
    python bench/plan_memory.py gpu --show FILE                an earlier measurement next to today's plan

Each case is a few steps of the real Trainer on random tokens, without checkpoints. On a GPU, bytes are those of torch's
caching allocator: peak allocated and reserved. Besides the peak of the run, which `trainyard train` logs as
memory_bytes, the results have the bytes after building, the peak of the last step until all gradients are ready, and
the peak of its update. On a CPU, bytes are those of torch's allocator as its profiler reports them, event by event,
from before the Trainer is built; the allocator also counts what gloo's threads free, which the profiler does not see.
"""

import argparse
import ctypes
import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trainyard import Trainer
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.devices import DEVICES
from trainyard.launch.launcher import reserved_port
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.memory.peak import estimate_memory
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.run.callbacks import Callback, TrainerView

LLAMA: dict[str, Any] = {
    "model": {
        "family": "llama", "vocab": 32256, "hidden": 2048, "layers": 24, "heads": 16, "ffn": 5504,
        "max_positions": 16384,
    },
    "data": {"source": "synthetic", "seq_len": 4096},
    "train": {"steps": 5, "global_batch": 8, "micro_batch": 4},
    "precision": {"kind": "bf16"},
}  # fmt: skip
GPT: dict[str, Any] = {
    "model": {
        "family": "gpt", "vocab": 50257, "hidden": 2048, "layers": 18, "heads": 16, "max_positions": 2048,
        "embedding_dropout": 0.1, "hidden_dropout": 0.1, "attention_dropout": 0.1,
    },
    "data": {"source": "synthetic", "seq_len": 2048},
    "train": {"steps": 5, "global_batch": 16, "micro_batch": 8},
    "precision": {"kind": "bf16"},
}  # fmt: skip
BERT: dict[str, Any] = {
    "model": {"family": "bert", "vocab": 30522, "hidden": 1024, "layers": 24, "heads": 16, "max_positions": 512},
    "data": {"source": "synthetic", "seq_len": 128, "max_predictions": 20},
    "train": {"steps": 5, "global_batch": 512, "micro_batch": 256},
    "precision": {"kind": "bf16"},
}
SMALL_FP32_LLAMA: dict[str, Any] = {
    "model": {
        "family": "llama", "vocab": 32000, "hidden": 1024, "layers": 12, "heads": 16, "kv_heads": 4, "ffn": 2816,
        "max_positions": 2048, "tie_embeddings": True,
    },
    "data": {"source": "synthetic", "seq_len": 2048},
    "train": {"steps": 5, "global_batch": 16, "micro_batch": 8},
    "precision": {"kind": "fp32"},
}  # fmt: skip
LARGE_VOCAB = ["model.vocab=128256", "model.layers=12", "model.kv_heads=4", "train.micro_batch=2", "data.seq_len=8192"]
GPU_CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama-8": (LLAMA, ["train.micro_batch=8", "train.global_batch=16"]),
    "llama-attention": (LLAMA, ["recompute.kind=attention"]),
    "llama-parts": (LLAMA, ["recompute.kind=selective", "recompute.modules=[activation,norm]"]),
    "llama-full": (LLAMA, ["recompute.kind=full", "train.micro_batch=8", "train.global_batch=16"]),
    "llama-bf16-gradients": (LLAMA, ["precision.grad_dtype=bf16"]),
    "llama-sr": (LLAMA, ["precision.kind=bf16_sr"]),
    "llama-fp8": (LLAMA, ["precision.kind=fp8"]),
    "llama-plain": (LLAMA, ["device.kernels=plain", "train.micro_batch=2"]),
    "llama-compiled": (LLAMA, ["compile.enabled=true"]),
    "llama-wide": (LLAMA, LARGE_VOCAB),
    "llama-fp32": (SMALL_FP32_LLAMA, []),
    "gpt": (GPT, []),
    "gpt-full": (GPT, ["recompute.kind=full"]),
    "bert": (BERT, []),
    "bert-replay": (BERT, ["compile.cuda_graphs=true"]),
}


def _small_case(family: str, **more: Any) -> dict[str, Any]:
    """Return a case with tens of MB of weights, so that tensors dominate constants, that takes seconds."""
    model = {"family": family, "vocab": 4096, "hidden": 512, "layers": 4, "heads": 8, "max_positions": 256, **more}
    return {
        "model": model,
        "data": {"source": "synthetic", "seq_len": 256, "max_predictions": 38},
        "train": {"steps": 2, "global_batch": 8, "micro_batch": 4},
        "device": {"name": "cpu"},
    }


CPU_MODELS = {
    "llama": _small_case("llama", ffn=1408, kv_heads=4),
    "gpt": _small_case("gpt", hidden_dropout=0.1, attention_dropout=0.1),
    "bert": _small_case("bert"),
    "experts": _small_case("mixtral", ffn=704, kv_heads=4, experts=4),
}
BF16 = "precision.kind=bf16"
REPEATS = 2
CPU_CASES: dict[str, tuple[str, int, list[str]]] = {
    "llama-fp32": ("llama", 1, []),
    "llama": ("llama", 1, [BF16]),
    "llama-attention": ("llama", 1, [BF16, "recompute.kind=attention"]),
    "llama-parts": ("llama", 1, [BF16, "recompute.kind=selective", "recompute.modules=[activation,norm]"]),
    "llama-full": ("llama", 1, [BF16, "recompute.kind=full", "model.vocab=1024"]),
    "llama-sr": ("llama", 1, ["precision.kind=bf16_sr"]),
    "gpt": ("gpt", 1, [BF16]),
    "bert": ("bert", 1, []),
    "llama-zero0": ("llama", 2, [BF16]),
    "llama-zero1": ("llama", 2, [BF16, "layout.zero=1"]),
    "llama-zero2": ("llama", 2, [BF16, "layout.zero=2"]),
    "llama-zero3": ("llama", 2, [BF16, "layout.zero=3"]),
    "llama-tp": ("llama", 2, [BF16, "layout.tp=2"]),
    "gpt-sequence": ("gpt", 2, [BF16, "layout.tp=2", "layout.sequence_parallel=true"]),
    "llama-pp": ("llama", 2, [BF16, "layout.pp=2", "train.micro_batch=2"]),
    "llama-cp": ("llama", 2, [BF16, "layout.cp=2"]),
    "experts": ("experts", 1, [BF16]),
    "experts-capacity": ("experts", 1, [BF16, "model.capacity_factor=1.25"]),
    "experts-zero1": ("experts", 2, [BF16, "layout.ep=2", "layout.zero=1"]),
    "llama-tp-pp": ("llama", 4, [BF16, "layout.tp=2", "layout.pp=2", "train.micro_batch=2"]),
    "llama-sequence-zero1": ("llama", 4, [BF16, "layout.tp=2", "layout.sequence_parallel=true", "layout.zero=1"]),
}


def make_config(where: str, case: str, directory: str = ".") -> tuple[Config, Layout]:
    base, ranks, words = (
        (*GPU_CASES[case][:1], 1, GPU_CASES[case][1])
        if where == "gpu"
        else (CPU_MODELS[CPU_CASES[case][0]], *CPU_CASES[case][1:])
    )
    quiet = ["checkpoint.export_hf=false", "log.every=1", "log.loggers=[]", f"log.directory={directory}"]
    config = parse(json.loads(json.dumps(base)), [*words, *quiet])
    return config, Layout.from_config(config, ranks)


class MemoryRecorder(Callback):
    """Splits the peak memory of a step into forward with backward, and update."""

    def __init__(self) -> None:
        self.peak = self.backward_peak = self.before_update = 0

    def on_gradients_ready(self, trainer: TrainerView) -> None:
        self.backward_peak = torch.cuda.max_memory_allocated()
        self.peak = max(self.peak, self.backward_peak)
        torch.cuda.reset_peak_memory_stats()
        self.before_update = torch.cuda.memory_allocated()


def measure_on_gpu(case: str) -> dict[str, float]:
    """Measure one case; runs in its own process."""
    with tempfile.TemporaryDirectory() as directory:
        config, _ = make_config("gpu", case, directory)
        recorder = MemoryRecorder()
        trainer = Trainer(config, callbacks=[recorder])
        built = {"built": torch.cuda.memory_allocated(), "building": torch.cuda.max_memory_allocated()}
        trainer.run()
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    update = torch.cuda.max_memory_allocated()
    return {
        **built,
        "backward": recorder.backward_peak,
        "before_update": recorder.before_update,
        "update": update,
        "memory_bytes": max(built["building"], recorder.peak, update),
        "reserved": torch.cuda.memory_reserved(),
        "ms": statistics.median(record["ms_per_iteration"] for record in records[2:]),
        "loss": records[-1]["loss"],
    }


@contextmanager
def count_all_threads() -> Iterator[None]:
    """Make torch's allocator count for all threads; by default it counts only for those that the profiler knows."""
    (library,) = (Path(torch.__file__).parent / "lib").glob("libc10.*")
    flag = ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage")
    before, flag.value = flag.value, True
    try:
        yield
    finally:
        flag.value = before


def measure_rank_on_cpu(config: Config) -> dict[str, float]:
    """Return this rank's peak over two steps, and its pipeline rank."""
    gc.collect()
    with count_all_threads(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer = Trainer(config)
        batch = trainer.loader.batch(0, trainer.batch_slice)
        for number in (1, 2):
            trainer.train_step(batch, number, 1e-3)
        trainer.optimizer.wait_for_weights()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    totals = [event["args"]["Total Allocated"] for event in events]
    before = totals[0] - events[0]["args"]["Bytes"]
    return {"pp": trainer.mesh.coords["pp"], "memory_bytes": max(totals) - before}


def measure_on_cpu(case: str) -> dict[str, list[int]]:
    """Return the sorted peaks of the ranks of each pipeline rank."""
    ranks = CPU_CASES[case][1]
    with reserved_port() as port:
        shared = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "cpu", "--one", case],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate() for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{case}: " + outputs[0][1][-2000:])
    results = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    stages: dict[str, list[int]] = {}
    for result in results:
        stages.setdefault(str(result["pp"]), []).append(result["memory_bytes"])
    return {stage: sorted(peaks) for stage, peaks in stages.items()}


def describe_machine() -> dict[str, str]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"name": name, "torch": torch.__version__, "date": datetime.date.today().isoformat()}


def measure_case(where: str, case: str) -> dict[str, Any]:
    if where == "cpu":
        # Communication threads of several ranks free what was sent at varying times.
        runs = [measure_on_cpu(case) for _ in range(REPEATS if CPU_CASES[case][1] > 1 else 1)]
        return {"places": {stage: sorted(peak for run in runs for peak in run[stage]) for stage in runs[0]}}
    done = subprocess.run([sys.executable, __file__, "gpu", "--one", case], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_case(where: str, case: str, found: dict[str, Any]) -> None:
    """Print one line per pipeline rank: allocated (minimum to maximum if they differ), planned, and their ratio."""
    config, layout = make_config(where, case)
    places = found.get("places") or {"0": [found["memory_bytes"]]}
    for pp, peaks in sorted(places.items()):
        plan = estimate_memory(PlannedRun(config, layout, DEVICES.find("cuda" if where == "gpu" else where)), int(pp))
        allocated = plan.total - plan.fragmentation
        name = case if len(places) == 1 else f"{case}, stage {pp}"
        ends = sorted({peaks[0], peaks[-1]})
        got = " to ".join(f"{peak / 2**20:.1f}" for peak in ends)
        ratio = " to ".join(f"{allocated / peak:.3f}" for peak in ends)
        held = f"  reserved {found['reserved'] / peaks[0]:.3f} of it" if "reserved" in found else ""
        print(f"{name:28} {got:>16} MiB  planned {allocated / 2**20:10.1f}  {ratio}{held}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=["gpu", "cpu"])
    parser.add_argument("--case", action="append", help="repeatable")
    parser.add_argument("--out", type=Path, help="write the results to this file as JSON, next to those of other cases")
    parser.add_argument("--show", type=Path, help="measure nothing; read this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    where, cases = arguments.where, {"gpu": GPU_CASES, "cpu": CPU_CASES}[arguments.where]
    if arguments.one:
        config, _ = make_config(where, arguments.one)
        print(json.dumps(measure_on_gpu(arguments.one) if where == "gpu" else measure_rank_on_cpu(config)))
        return
    source = arguments.show or arguments.out
    results: dict[str, Any] = json.loads(source.read_text()) if source and source.exists() else {}
    if unknown := set(arguments.case or ()) - set(cases):
        parser.error(f"--case {sorted(unknown)[0]}: not one of {', '.join(cases)}")
    for case in arguments.case or cases:
        if not arguments.show:
            results[case] = {"machine": describe_machine(), **measure_case(where, case)}
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=2) + "\n")
        if case in results:
            print_case(where, case, results[case])


if __name__ == "__main__":
    main()
