"""Checkpoints: speed of conversion, stall of a run during saves, bytes read when resharding.

    python bench/checkpoint.py --directory DISK --out bench/results/checkpoint-cpu.json

convert: a Hugging Face model of 13 GB (Llama 2 7B shapes in bf16, random bytes) to Hugging Face, to NxD (tp 8, with and
without xser) and back, against `cp -r` of the same files on the same disk; each starts with an empty page cache (if
permitted) and ends with a sync; memory is the peak anonymous memory of the process. save: how long steps wait for an
asynchronous checkpoint, against a blocking one. reshard: bytes that each rank reads of a checkpoint of another layout,
against the bytes that it needs.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard import models
from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.checkpoint.partition import rank_slices
from trainyard.config.load import load, parse
from trainyard.core.splits import shard_rows
from trainyard.core.tensor_slice import TensorSlice
from trainyard.formats.convert import ConversionTarget, convert_checkpoint, parse_layout
from trainyard.formats.hf import write_hf
from trainyard.formats.native_writer import weights_only_state, write_checkpoint
from trainyard.formats.registry import open_weights
from trainyard.parallel.layout import Layout
from trainyard.remote.storage import open_storage
from trainyard.run.callbacks import Callback, TrainerView
from trainyard.run.trainer import Trainer


class RandomWeights:
    """Untrained weights: ranges of one random array."""

    def __init__(self, model: models.ModelConfig) -> None:
        self.model = model
        self.values = torch.randint(0, 2**15, (2**27,), dtype=torch.int16).view(torch.bfloat16)

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def read(self, wanted: TensorSlice) -> Tensor:
        start = hash(wanted.name) % max(len(self.values) - wanted.numel, 1)
        values = self.values[start : start + wanted.numel]
        if len(values) < wanted.numel:
            values = self.values.repeat(-(-wanted.numel // len(self.values)))[: wanted.numel]
        return values.view(wanted.sizes)


class PeakMemory:
    """Peak anonymous and resident memory of this process, sampled 50 times per second."""

    def __enter__(self) -> "PeakMemory":
        self.anonymous_bytes = self.resident_bytes = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()
        return self

    def _sample(self) -> None:
        while not self.done.wait(0.02):
            status = Path("/proc/self/status").read_text()
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in status.splitlines() if "kB" in line}
            self.anonymous_bytes = max(self.anonymous_bytes, sizes["RssAnon"])
            self.resident_bytes = max(self.resident_bytes, sizes["VmRSS"])

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()


def drop_page_cache() -> bool:
    """Drop the page cache; returns False if not permitted."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def time_cold(work: Callable[[], None]) -> float:
    drop_page_cache()
    start = time.perf_counter()
    work()
    os.sync()
    return time.perf_counter() - start


def bench_convert(root: Path, layers: int) -> dict[str, Any]:
    model = load("llama2-7b").model.model_copy(update={"layers": layers})
    source = root / "hf"
    write_hf(source, RandomWeights(model))
    size = sum(path.stat().st_size for path in source.iterdir())
    out: dict[str, Any] = {"bytes": size, "page_cache_emptied": drop_page_cache(), "runs": []}

    def record(what: str, seconds: float, memory: dict[str, int] | None = None) -> None:
        row = {"what": what, "seconds": round(seconds, 2), "GB_per_second": round(size / seconds / 1e9, 3)}
        out["runs"].append(row | (memory or {}))
        print(out["runs"][-1], flush=True)

    def copy() -> None:
        subprocess.run(["cp", "-r", str(source), str(root / "copy")], check=True)

    def convert(what: str, start: Path, name: str, to: str, layout: str = "", xser: bool = False) -> None:
        """Convert in a separate process, to measure its memory."""
        command = [sys.executable, __file__, "--convert", str(start), str(root / name), to, layout, str(int(xser))]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        record(what, result.pop("seconds"), result)

    record("cp -r", time_cold(copy))
    shutil.rmtree(root / "copy")
    convert("hf to hf", source, "hf2", "hf")
    out["hf_to_hf_same_bytes"] = same_files(source, root / "hf2")
    shutil.rmtree(root / "hf2")
    convert("hf to NxD tp=8", source, "nxd", "nxd", "tp=8")
    convert("NxD tp=8 to hf", root / "nxd", "hf2", "hf")
    out["through_nxd_same_bytes"] = same_files(source, root / "hf2")
    shutil.rmtree(root / "hf2")
    shutil.rmtree(root / "nxd")
    convert("hf to NxD tp=8 pp=4 xser", source, "nxd", "nxd", "tp=8,pp=4", xser=True)
    shutil.rmtree(root / "nxd")
    convert("hf to native tp=4", source, "native", "native", "tp=4")
    shutil.rmtree(root / "native")
    record("cp -r again", time_cold(copy))
    shutil.rmtree(root / "copy")
    shutil.rmtree(source)
    copies = [row["seconds"] for row in out["runs"] if row["what"].startswith("cp")]
    for row in out["runs"]:
        row["speed_of_cp"] = round(sum(copies) / len(copies) / row["seconds"], 2)
    return out


def same_files(first: Path, second: Path) -> bool:
    """Compare the safetensors files of two directories byte by byte."""
    return all(
        subprocess.run(["cmp", str(path), str(second / path.name)], check=False).returncode == 0
        for path in first.glob("*.safetensors")
    )


def convert_in_process(source: str, target: str, to: Any, layout: str, xser: str) -> None:
    with PeakMemory() as memory:
        opened = open_weights(source)
        spec = ConversionTarget(to, parse_layout(to, layout), xser=bool(int(xser)))
        seconds = time_cold(lambda: convert_checkpoint(opened, Path(source), Path(target), spec, lambda count: None))
    print(
        json.dumps(
            {
                "seconds": seconds,
                "anonymous_MiB": memory.anonymous_bytes // 2**20,
                "resident_MiB": memory.resident_bytes // 2**20,
            }
        )
    )


class SaveRecorder(Callback):
    def __init__(self) -> None:
        self.saves: list[dict[str, Any]] = []

    def on_checkpoint(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        self.saves.append(record)


def bench_save(root: Path) -> dict[str, Any]:
    """Train a Llama of 125 million weights on the CPU: 1.5 GB of state."""
    model = {"family": "llama", "vocab": 32000, "hidden": 768, "layers": 10, "heads": 12, "ffn": 2304}
    base: dict[str, Any] = {
        "model": {**model, "max_positions": 128},
        "data": {"source": "synthetic", "seq_len": 128},
        "train": {"steps": 12, "global_batch": 4, "micro_batch": 4},
        "log": {"every": 4, "loggers": [], "directory": str(root / "runs")},
        "device": {"name": "cpu"},
    }
    out: dict[str, Any] = {}
    none = {"every": 0, "export_hf": False}
    Trainer(parse({**base, "checkpoint": none, "train": {**base["train"], "steps": 2}})).run()  # warm-up
    out["run_seconds_without"] = round(Trainer(parse({**base, "checkpoint": none})).run().seconds, 2)
    for blocking in (True, False):
        recorder = SaveRecorder()
        section = {"every": 4, "export_hf": False, "blocking": blocking, "keep": 1}
        summary = Trainer(parse({**base, "checkpoint": section}), callbacks=[recorder]).run()
        # The first save allocates host memory, and the run waits for the last one.
        middle = recorder.saves[1]
        out["blocking" if blocking else "meanwhile"] = {
            "bytes": middle["checkpoint_bytes"],
            "steps_waited_seconds": round(middle["checkpoint_stall"], 3),
            "until_complete_seconds": round(middle["checkpoint_seconds"], 3),
            "first_waited_seconds": round(recorder.saves[0]["checkpoint_stall"], 3),
            "run_seconds_with_three": round(summary.seconds, 2),
        }
        shutil.rmtree(root / "runs")
    out["waits_over_blocking"] = round(
        out["meanwhile"]["steps_waited_seconds"] / out["blocking"]["steps_waited_seconds"], 4
    )
    print(out, flush=True)
    return out


def bench_reshard(root: Path) -> list[dict[str, Any]]:
    model = {"family": "llama", "vocab": 32000, "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 1536}
    section = {"model": {**model, "max_positions": 128}, "data": {"source": "synthetic", "seq_len": 128}}
    rows = []
    for before, after in (("tp=4,dp=2", "tp=2,pp=2,dp=4"), ("dp=8", "tp=8"), ("tp=8", "dp=8")):
        sizes = {key: int(value) for key, value in (item.split("=") for item in before.split(","))}
        dp = sizes.pop("dp", 1)
        config = parse({**section, "layout": sizes, "train": {"steps": 1, "global_batch": 16}})
        blueprint = models.family_of(config.model).blueprint(config.model)
        write_checkpoint(
            root / "one", weights_only_state(RandomWeights(config.model)), config, dp * sizes.get("tp", 1), {"step": 0}
        )
        sizes = {key: int(value) for key, value in (item.split("=") for item in after.split(","))}
        dp = sizes.pop("dp", 1)
        config = parse({**section, "layout": sizes, "train": {"steps": 1, "global_batch": 16}})
        layout = Layout.from_config(config, dp * sizes.get("tp", 1) * sizes.get("pp", 1))
        read = needed = 0
        for rank in range(layout.world_size):
            coords = layout.coords(rank)
            with Checkpoint(open_storage(root / "one")) as checkpoint:
                for name in blueprint.parameter_names():
                    shard = layout.model_shard(rank)
                    own_rows = shard_rows(blueprint.local_shape(name, shard)[0], layout.dp, coords["dp"])
                    for tensor_slice in rank_slices(blueprint, name, shard, own_rows, skip_replicas=False):
                        needed += checkpoint.read_state("weights", tensor_slice).nbytes
                read += checkpoint.bytes_read
        shutil.rmtree(root / "one")
        rows.append({"from": before, "to": f"{after} (ZeRO-1)", "bytes_needed": needed, "bytes_read": read})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if sys.argv[1:2] == ["--convert"]:
        convert_in_process(*sys.argv[2:])
        return
    parser.add_argument("--directory", type=Path, required=True, help="an empty directory on the disk to measure")
    parser.add_argument("--only", choices=("reshard", "save", "convert"))
    parser.add_argument("--layers", type=int, default=32, help="layers of the converted 7B model")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    benchmarks: dict[str, Callable[[], Any]] = {
        "reshard": lambda: bench_reshard(arguments.directory),
        "save": lambda: bench_save(arguments.directory),
        "convert": lambda: bench_convert(arguments.directory, arguments.layers),
    }
    results: dict[str, Any] = {
        "date": str(date.today()),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
    }
    results |= {name: benchmark() for name, benchmark in benchmarks.items() if arguments.only in (None, name)}
    text = json.dumps(results, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
