"""Checkpoints: how fast they are converted, how little they hold up a run, how much is read of them.

    python bench/checkpoint.py --directory DISK --out bench/results/checkpoint-cpu.json

convert: a Hugging Face model of 13 GB (Llama 2 7B's shapes in bf16, random bytes) to Hugging Face, to NxD (tp 8, with
and without xser) and back, against `cp -r` of the same files on the same disk, each followed by a sync and started with
nothing in the page cache (where that may be emptied); memory is the largest anonymous memory of the process. save: how
long steps wait for a checkpoint that is written while they go on, against one they wait for. reshard: bytes that each
rank reads of a checkpoint of another layout, against the bytes that it needs.
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
from trainyard.checkpoint.convert import Target, convert, parse_layout
from trainyard.checkpoint.formats.hf import write_hf
from trainyard.checkpoint.formats.tensor_map import Region
from trainyard.checkpoint.io.storage import open_place
from trainyard.checkpoint.native.checkpoint import Checkpoint
from trainyard.checkpoint.native.partition import boxes, share_of_rows
from trainyard.checkpoint.native.writer import WeightsAlone, write_native
from trainyard.checkpoint.registry import open_weights
from trainyard.config.load import load, parse
from trainyard.parallel.layout import Layout
from trainyard.train.callbacks import Hook, Run
from trainyard.train.trainer import Trainer


class Random:
    """Weights that nobody trained: stretches of one random block."""

    def __init__(self, model: models.AnyModel) -> None:
        self.model = model
        self.block = torch.randint(0, 2**15, (2**27,), dtype=torch.int16).view(torch.bfloat16)

    def dtype(self, part: str) -> torch.dtype:
        return torch.bfloat16

    def read(self, part: str, region: Region) -> Tensor:
        shape = [each.stop - each.start for each in region]
        count = torch.Size(shape).numel()
        start = hash(part) % max(len(self.block) - count, 1)
        whole = self.block[start : start + count]
        if len(whole) < count:
            whole = self.block.repeat(-(-count // len(self.block)))[:count]
        return whole.view(shape)


class Memory:
    """The largest anonymous memory of this process, looked at 50 times a second."""

    def __enter__(self) -> "Memory":
        self.peak = self.mapped = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()
        return self

    def _look(self) -> None:
        while not self.done.wait(0.02):
            status = Path("/proc/self/status").read_text()
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in status.splitlines() if "kB" in line}
            self.peak = max(self.peak, sizes["RssAnon"])
            self.mapped = max(self.mapped, sizes["VmRSS"])

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()


def forget() -> bool:
    """Empty the page cache, where this process may."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def timed(work: Callable[[], None]) -> float:
    forget()
    start = time.perf_counter()
    work()
    os.sync()
    return time.perf_counter() - start


def conversions(root: Path, layers: int) -> dict[str, Any]:
    model = load("llama2-7b").model.model_copy(update={"layers": layers})
    source = root / "hf"
    write_hf(source, Random(model))
    size = sum(path.stat().st_size for path in source.iterdir())
    out: dict[str, Any] = {"bytes": size, "page_cache_emptied": forget(), "runs": []}

    def record(what: str, seconds: float, memory: dict[str, int] | None = None) -> None:
        row = {"what": what, "seconds": round(seconds, 2), "GB_per_second": round(size / seconds / 1e9, 3)}
        out["runs"].append(row | (memory or {}))
        print(out["runs"][-1], flush=True)

    def copy() -> None:
        subprocess.run(["cp", "-r", str(source), str(root / "copy")], check=True)

    def one(what: str, start: Path, name: str, to: str, layout: str = "", xser: bool = False) -> None:
        """In a process of its own, whose memory is its own."""
        words = [sys.executable, __file__, "--convert", str(start), str(root / name), to, layout, str(int(xser))]
        found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        record(what, found.pop("seconds"), found)

    record("cp -r", timed(copy))
    shutil.rmtree(root / "copy")
    one("hf to hf", source, "hf2", "hf")
    same = all(
        subprocess.run(["cmp", str(path), str(root / "hf2" / path.name)], check=False).returncode == 0
        for path in source.glob("*.safetensors")
    )
    out["hf_to_hf_same_bytes"] = same
    shutil.rmtree(root / "hf2")
    one("hf to NxD tp=8", source, "nxd", "nxd", "tp=8")
    one("NxD tp=8 to hf", root / "nxd", "hf2", "hf")
    out["through_nxd_same_bytes"] = all(
        subprocess.run(["cmp", str(path), str(root / "hf2" / path.name)], check=False).returncode == 0
        for path in source.glob("*.safetensors")
    )
    shutil.rmtree(root / "hf2")
    shutil.rmtree(root / "nxd")
    one("hf to NxD tp=8 pp=4 xser", source, "nxd", "nxd", "tp=8,pp=4", xser=True)
    shutil.rmtree(root / "nxd")
    one("hf to native tp=4", source, "native", "native", "tp=4")
    shutil.rmtree(root / "native")
    record("cp -r again", timed(copy))
    shutil.rmtree(root / "copy")
    shutil.rmtree(source)
    copies = [row["seconds"] for row in out["runs"] if row["what"].startswith("cp")]
    for row in out["runs"]:
        row["speed_of_cp"] = round(sum(copies) / len(copies) / row["seconds"], 2)
    return out


def convert_alone(source: str, target: str, to: Any, layout: str, xser: str) -> None:
    with Memory() as memory:
        opened = open_weights(source)
        wanted = Target(to, parse_layout(to, layout), xser=bool(int(xser)))
        seconds = timed(lambda: convert(opened, Path(source), Path(target), wanted, lambda count: None))
    print(
        json.dumps({"seconds": seconds, "anonymous_MiB": memory.peak // 2**20, "resident_MiB": memory.mapped // 2**20})
    )


class Watch(Hook):
    def __init__(self) -> None:
        self.saves: list[dict[str, Any]] = []

    def on_checkpoint(self, trainer: Run, record: dict[str, Any]) -> None:
        self.saves.append(record)


def saving(root: Path) -> dict[str, Any]:
    """A Llama of 125 million weights on this machine's CPU: 1.5 GB of state."""
    model = {"family": "llama", "vocab": 32000, "hidden": 768, "layers": 10, "heads": 12, "ffn": 2304}
    base: dict[str, Any] = {
        "model": {**model, "max_positions": 128},
        "data": {"source": "synthetic", "sequence": 128},
        "train": {"steps": 12, "global_batch": 4, "micro_batch": 4},
        "log": {"every": 4, "tensorboard": False, "directory": str(root / "runs")},
        "device": {"name": "cpu"},
    }
    out: dict[str, Any] = {}
    none = {"every": 0, "final": False}
    Trainer(parse({**base, "checkpoint": none, "train": {**base["train"], "steps": 2}})).run()  # warms up
    out["run_seconds_without"] = round(Trainer(parse({**base, "checkpoint": none})).run().seconds, 2)
    for blocking in (True, False):
        watch = Watch()
        section = {"every": 4, "final": False, "blocking": blocking, "keep": 1}
        summary = Trainer(parse({**base, "checkpoint": section}), hooks=[watch]).run()
        # The first allocates the memory of the copy, the last one is waited for by the end of the run.
        middle = watch.saves[1]
        out["blocking" if blocking else "meanwhile"] = {
            "bytes": middle["checkpoint_bytes"],
            "steps_waited_seconds": round(middle["checkpoint_stall"], 3),
            "until_complete_seconds": round(middle["checkpoint_seconds"], 3),
            "first_waited_seconds": round(watch.saves[0]["checkpoint_stall"], 3),
            "run_seconds_with_three": round(summary.seconds, 2),
        }
        shutil.rmtree(root / "runs")
    out["waits_over_blocking"] = round(
        out["meanwhile"]["steps_waited_seconds"] / out["blocking"]["steps_waited_seconds"], 4
    )
    print(out, flush=True)
    return out


def resharding(root: Path) -> list[dict[str, Any]]:
    model = {"family": "llama", "vocab": 32000, "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 1536}
    section = {"model": {**model, "max_positions": 128}, "data": {"source": "synthetic", "sequence": 128}}
    rows = []
    for before, after in (("tp=4,dp=2", "tp=2,pp=2,dp=4"), ("dp=8", "tp=8"), ("tp=8", "dp=8")):
        sizes = {key: int(value) for key, value in (word.split("=") for word in before.split(","))}
        dp = sizes.pop("dp", 1)
        config = parse({**section, "layout": sizes, "train": {"steps": 1, "global_batch": 16}})
        blueprint = models.family(config.model).blueprint(config.model)
        write_native(root / "one", WeightsAlone(Random(config.model)), config, dp * sizes.get("tp", 1), {"step": 0})
        sizes = {key: int(value) for key, value in (word.split("=") for word in after.split(","))}
        dp = sizes.pop("dp", 1)
        config = parse({**section, "layout": sizes, "train": {"steps": 1, "global_batch": 16}})
        layout = Layout.of(config, dp * sizes.get("tp", 1) * sizes.get("pp", 1))
        read = needed = 0
        for rank in range(layout.world):
            place = layout.place(rank)
            with Checkpoint(open_place(root / "one")) as checkpoint:
                for name in blueprint.names():
                    rows_held = blueprint.local_shape(name, layout.tp, place["tp"])[0]
                    mine = share_of_rows(rows_held, layout.dp, place["dp"])
                    for box in boxes(blueprint, name, layout.tp, place["tp"], mine, once=False):
                        needed += checkpoint.tensor("weights", box).nbytes
                read += checkpoint.bytes_read
        shutil.rmtree(root / "one")
        rows.append({"from": before, "to": f"{after} (ZeRO-1)", "bytes_needed": needed, "bytes_read": read})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if sys.argv[1:2] == ["--convert"]:
        convert_alone(*sys.argv[2:])
        return
    parser.add_argument("--directory", type=Path, required=True, help="an empty directory on the disk to measure")
    parser.add_argument("--only", choices=("reshard", "save", "convert"))
    parser.add_argument("--layers", type=int, default=32, help="of the 7B model that is converted")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    works: dict[str, Callable[[], Any]] = {
        "reshard": lambda: resharding(arguments.directory),
        "save": lambda: saving(arguments.directory),
        "convert": lambda: conversions(arguments.directory, arguments.layers),
    }
    found: dict[str, Any] = {
        "date": str(date.today()),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
    }
    found |= {name: work() for name, work in works.items() if arguments.only in (None, name)}
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
