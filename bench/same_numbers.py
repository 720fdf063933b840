"""Numbers that a change of structure must not change: losses and weights of runs, converted files, plans.

    python bench/same_numbers.py --out before.json               # in the tree before
    python bench/same_numbers.py --out after.json                # in the tree after
    python bench/same_numbers.py --compare before.json after.json
    python bench/same_numbers.py --device cuda --out gpu.json    # nine runs on one GPU

Runs the commands of the tree in which it is called, through its fork server: trainings over families, layouts,
precisions, optimizers and resumes (every loss and gradient norm as written, a hash of the weights), conversions of what
they saved (a hash of all tensors), and plans (a hash of their JSON). Only the command line is used, so two trees with
different modules compare.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())
from safetensors import safe_open

from tests.support.forkserver import ForkServer

SHAPE = {"hidden": 32, "layers": 4, "heads": 4, "max_positions": 64}
LLAMA = {"family": "llama", "vocab": 260, "kv_heads": 2, "ffn": 48, **SHAPE}
MOE = {**LLAMA, "family": "mixtral", "experts": 4, "top_k": 2, "balance_loss": 0.1, "z_loss": 0.01}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_embeddings": True},
    "mistral": {**LLAMA, "family": "mistral", "sliding_window": 8},
    "qwen2": {**LLAMA, "family": "qwen2"},
    "qwen3": {**LLAMA, "family": "qwen3"},
    "mixtral": MOE,
    "router_bias": {**MOE, "router_bias": True, "bias_update_rate": 0.02},
    "gpt": {"family": "gpt", "vocab": 260, **SHAPE, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "bert": {"family": "bert", "vocab": 260, "ffn": 64, **SHAPE, "hidden_dropout": 0.1},
}
BASE = (
    *("data.source=synthetic", "data.seq_len=16", "data.max_predictions=4", "train.steps=6", "train.global_batch=8"),
    *("train.micro_batch=1", "log.every=1", "log.loggers=[]", "checkpoint.every=3", "log.name=run"),
    *("schedule.warmup_steps=2", "device.threads=1"),
)
VARIANTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "accumulated": (1, ("train.micro_batch=4", "recompute.kind=full")),
    "bf16": (1, ("precision.kind=bf16",)),
    "muon": (1, ("optimizer.kind=muon",)),
    "fp8": (1, ("precision.kind=fp8", "train.micro_batch=4")),
    "lamb": (1, ("optimizer.kind=lamb", "schedule.kind=linear")),
    "tp2-sp": (2, ("layout.tp=2", "layout.sequence_parallel=true")),
    "pp2": (2, ("layout.pp=2",)),
    "cp2": (2, ("layout.cp=2",)),
    "zero1": (2, ("layout.zero=1",)),
    "zero3-resume": (2, ("layout.zero=3",)),
}
"""Ranks and overrides."""
CASES = [
    *(("llama", variant) for variant in VARIANTS if variant != "fp8"),
    *(("mixtral", variant) for variant in ("one", "accumulated", "bf16", "tp2-sp", "pp2", "zero1", "zero3-resume")),
    *(("gpt", variant) for variant in ("one", "bf16", "muon", "tp2-sp", "pp2", "cp2", "zero3-resume")),
    *(("bert", variant) for variant in ("one", "accumulated", "lamb", "tp2-sp", "pp2", "zero1")),
    *(("qwen3", variant) for variant in ("one", "bf16", "tp2-sp", "pp2")),
    *(("qwen2", variant) for variant in ("one", "muon", "tp2-sp", "zero1")),
    *(("mistral", variant) for variant in ("one", "cp2", "zero3-resume")),
    *(("tied", variant) for variant in ("one", "pp2", "tp2-sp", "zero3-resume")),
    *(("router_bias", variant) for variant in ("one", "accumulated", "tp2-sp", "pp2", "zero1")),
]
GPU_SHAPE = {"vocab": 1024, "hidden": 256, "heads": 4, "ffn": 512, "max_positions": 256}
GPU_WORDS = ("data.seq_len=256", "data.max_predictions=20", "compile.enabled=false")
GPU_CASES = [
    *(("llama", variant) for variant in ("one", "bf16", "fp8", "muon")),
    *(("mixtral", "bf16"), ("gpt", "bf16"), ("bert", "bf16"), ("qwen3", "bf16"), ("mistral", "bf16")),
]
"""Shapes that the fused kernels take."""
CONVERSIONS = (
    ("hf", ()),
    ("nxd", ("--layout", "tp=2,pp=2")),
    ("native", ("--layout", "tp=2,pp=2")),
    ("dcp", ()),
)
RECIPES = sorted(path.stem for path in Path("recipes").glob("*.yaml"))
PLAN_HARDWARE = {"tiny-llama": ("--hardware", "h100:1")}
"""Instead of this machine, whose speed a plan measures."""
PLAN_VARIANTS = ((), ("recompute.kind=none",), ("optimizer.kind=muon",), ("layout.zero=1",), ("train.micro_batch=2",))


def run_command(server: ForkServer, arguments: list[str], cwd: Path) -> str:
    """stdout of a command; of a failed one, the error line, which must not change either."""
    done = server.run(arguments, cwd)
    return done.stdout if done.returncode == 0 else f"exit {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"


def tensor_hash(directory: Path) -> str:
    """A hash over all tensors of a directory: names, types, shapes, bytes. Files that are not safetensors count whole,
    except for their JSON and pickle metadata, which names paths and times."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                for name in sorted(file.keys()):
                    if name.startswith("random."):  # generators that nothing seeds: they differ between any two runs
                        continue
                    tensor = file.get_tensor(name)
                    digest.update(f"{path.name} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                    digest.update(tensor.contiguous().flatten().view(dtype=_bytes_type()).numpy().tobytes())
        elif path.suffix in (".pt", ".distcp"):
            digest.update(f"{path.relative_to(directory)} {path.stat().st_size}".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _bytes_type() -> Any:
    import torch

    return torch.uint8


def train(server: ForkServer, model: dict[str, Any], variant: str, cwd: Path, device: str) -> dict[str, Any]:
    """Losses, gradient norms and weights of a run; with `resume`, of one that is stopped half-way and continues on one
    rank."""
    ranks, overrides = VARIANTS[variant]
    base = [f"model={json.dumps(model)}", *BASE, f"device.name={device}"]
    words = [*base, *overrides, *(GPU_WORDS if device != "cpu" else ())]
    if variant.endswith("resume"):
        stopped = [*words, "train.steps=3", "checkpoint.export_hf=false"]
        run_command(server, ["train", "tiny-llama", *stopped, "--nproc", str(ranks)], cwd)
        words, ranks = [*base, "checkpoint.resume=auto"], 1
    launch = ["--nproc", str(ranks)] if ranks > 1 else []
    output = run_command(server, ["train", "tiny-llama", *words, "checkpoint.export_hf=false", *launch], cwd)
    metrics = cwd / "runs" / "run" / "metrics.jsonl"
    if not metrics.exists():
        return {"failed": output[-300:]}
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = {record["step"]: [record["loss"], record["grad_norm"]] for record in records if "loss" in record}
    last = max((cwd / "runs" / "run" / "checkpoints").glob("step_*"))
    return {"steps": steps, "weights": tensor_hash(last)}


def measure_gpu(server: ForkServer, root: Path, device: str) -> Iterator[tuple[str, Any]]:
    for name, variant in GPU_CASES:
        (cwd := root / f"{name}-{variant}").mkdir()
        model = {**MODELS[name], **{key: value for key, value in GPU_SHAPE.items() if name != "gpt" or key != "ffn"}}
        yield f"run {name} {variant} {device}", train(server, model, variant, cwd, device)


def measure(server: ForkServer, root: Path) -> Iterator[tuple[str, Any]]:
    for name, variant in CASES:
        cwd = root / f"{name}-{variant}"
        cwd.mkdir()
        yield f"run {name} {variant}", train(server, MODELS[name], variant, cwd, "cpu")
        if variant == "one":
            for target, options in CONVERSIONS:
                run_command(server, ["convert", "runs/run", target, "--to", target, *options], cwd)
                yield f"convert {name} {target}", tensor_hash(cwd / target) if (cwd / target).exists() else "failed"
            native = run_command(server, ["convert", "hf", "back", "--to", "native"], cwd)
            yield f"convert {name} back", tensor_hash(cwd / "back") if (cwd / "back").exists() else native[-300:]
        shutil.rmtree(cwd)
    for recipe in RECIPES:
        for words in PLAN_VARIANTS:
            text = run_command(server, ["plan", recipe, *words, *PLAN_HARDWARE.get(recipe, ()), "--json"], root)
            value = text if len(text) < 200 else hashlib.sha256(text.encode()).hexdigest()[:16]
            yield f"plan {recipe} {' '.join(words)}", value


def compare(before: Path, after: Path, out: Path | None) -> int:
    old, new = (json.loads(path.read_text())["values"] for path in (before, after))
    different = [name for name in old if old[name] != new.get(name)]
    for name in different:
        print(f"DIFFERENT {name}: {old[name]} -> {new.get(name)}")
    kinds = {kind: sum(name.startswith(kind) for name in old) for kind in ("run", "convert", "plan")}
    print(f"{kinds}: {len(different)} different")
    if out:
        out.write_text(json.dumps({"compared": kinds, "different": different, "values": new}, indent=1) + "\n")
    return bool(different)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the numbers, or the result of a comparison")
    parser.add_argument("--device", default="cpu", help="anything else: nine runs there")
    parser.add_argument("--compare", type=Path, nargs=2)
    arguments = parser.parse_args()
    if arguments.compare:
        sys.exit(compare(*arguments.compare, arguments.out))
    server, start, values = ForkServer(), time.monotonic(), {}
    with tempfile.TemporaryDirectory(prefix="numbers-") as name:
        root = Path(name)
        found = measure(server, root) if arguments.device == "cpu" else measure_gpu(server, root, arguments.device)
        for key, value in found:
            values[key] = value
            print(f"{time.monotonic() - start:6.0f} s  {key}: {str(value)[:100]}", flush=True)
    server.close()
    if arguments.out:
        arguments.out.write_text(json.dumps({"values": values}, indent=1) + "\n")


if __name__ == "__main__":
    main()
