"""The training step on one GPU: trainyard next to transformers and torchtitan (if installed), in one run.

    python bench/gpu.py                                every case, trainyard and its peers
    python bench/gpu.py --case bert-large --only-ours
    python bench/gpu.py --case deepseek-1.3b --set precision.grad_dtype=bf16

trainyard is `trainyard train` in its own process: real loader, logging on, results from its metrics.jsonl (steps after
the fourth). A peer is the same step in its own process: forward, loss, backward, clipping and AdamW on random tokens of
the same shape with as many micro batches. transformers: bf16 weights with fp32 master weights and AdamW state, torch's
fused AdamW. torchtitan: its Llama 3 and Qwen3, its compiled blocks and loss, its FSDP2 on one rank (fp32 weights, bf16
compute) and its clipping. MFU counts every query-key pair (full) or only the unmasked ones (causal).
"""

import argparse
import datetime
import json
import os
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
import yaml

from trainyard import devices, models
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.families.builtin.llama import LlamaConfig
from trainyard.families.builtin.qwen3_moe import Qwen3MoeConfig
from trainyard.families.flops import flops_per_sample
from trainyard.families.hf_config import to_hf

DEEPSEEK = {
    "model": {
        "family": "llama", "vocab": 32256, "hidden": 2048, "layers": 24, "heads": 16, "ffn": 5504,
        "max_positions": 16384, "rope_theta": 100000.0, "rope_scaling": {"kind": "linear", "factor": 4.0},
    },
    "data": {"source": "synthetic", "seq_len": 4096},
    "train": {"steps": 12, "global_batch": 32, "micro_batch": 8},
    "precision": {"kind": "bf16"},
}  # fmt: skip
LLAMA = {
    "model": {
        "family": "llama", "vocab": 32000, "hidden": 4096, "layers": 32, "heads": 32, "ffn": 11008,
        "max_positions": 4096,
    },
    "data": {"source": "synthetic", "seq_len": 4096},
    "train": {"steps": 8, "global_batch": 16, "micro_batch": 1},
    "precision": {"kind": "bf16"},
}  # fmt: skip
LLAMA_1B = {
    "model": {
        "family": "llama", "vocab": 128256, "hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192,
        "max_positions": 4096, "rope_theta": 500000.0,
    },
    "data": {"source": "synthetic", "seq_len": 4096},
    "train": {"steps": 12, "global_batch": 32, "micro_batch": 8},
    "precision": {"kind": "bf16"},
}  # fmt: skip
MOE = {
    "model": {
        "family": "qwen3_moe", "vocab": 32000, "hidden": 2048, "layers": 16, "heads": 16, "kv_heads": 8, "ffn": 1792,
        "experts": 16, "top_k": 2, "normalize_top_k": True, "max_positions": 4096,
    },
    "data": {"source": "synthetic", "seq_len": 4096},
    "train": {"steps": 12, "global_batch": 32, "micro_batch": 8},
    "precision": {"kind": "bf16"},
}  # fmt: skip
GEMMA3_1B = {
    "model": {
        "family": "gemma3_text", "vocab": 262144, "hidden": 1152, "layers": 26, "heads": 4, "kv_heads": 1,
        "head_dim": 256, "ffn": 6912, "sliding_window": 512, "max_positions": 32768,
    },
    "data": {"source": "synthetic", "seq_len": 4096},
    "train": {"steps": 12, "global_batch": 16, "micro_batch": 4},
    "precision": {"kind": "bf16"},
}  # fmt: skip
BERT = {
    "model": {"family": "bert", "vocab": 30522, "hidden": 1024, "layers": 24, "heads": 16, "max_positions": 512},
    "data": {"source": "synthetic", "seq_len": 128, "max_predictions": 20},
    "train": {"steps": 24, "global_batch": 2048, "micro_batch": 512},
    "precision": {"kind": "bf16"},
    "compile": {"cuda_graphs": True},
}
CASES: dict[str, dict[str, Any]] = {
    "deepseek-1.3b": DEEPSEEK,
    "deepseek-1.3b-fp8": {**DEEPSEEK, "precision": {"kind": "fp8"}},
    "llama2-7b": LLAMA,
    "llama3.2-1b": LLAMA_1B,
    "llama3.2-1b-fp8": {**LLAMA_1B, "precision": {"kind": "fp8"}},
    "moe-3b": MOE,
    "gemma3-1b": GEMMA3_1B,
    "bert-large": BERT,
}
PEERS = ("transformers eager", "transformers compiled", "torchtitan")


def run_trainyard(case: str, overrides: list[str]) -> dict[str, float]:
    """Run `trainyard train` like a user does."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "case.yaml"
        file.write_text(yaml.safe_dump(CASES[case]))
        saves = ["checkpoint.export_hf=false", "checkpoint.every=0", "checkpoint.resume=none"]
        words = [f"log.directory={directory}", "log.every=4", *saves, *overrides]
        run = [sys.executable, "-m", "trainyard", "train", str(file), *words]
        done = subprocess.run(run, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{case}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    timed = [record["ms_per_iteration"] for record in records if record["step"] > 4]
    return {
        "ms": statistics.median(timed),
        "memory_bytes": records[-1]["memory_bytes"],
        "first_step_seconds": records[0]["seconds_from_start"],
        "loss": records[-1]["loss"],
    }


def time_peer(peer: str, case: str) -> dict[str, float]:
    """Time one peer; runs in its own process."""
    config = parse(json.loads(json.dumps(CASES[case])))
    device = torch.device("cuda")
    step = (
        torchtitan_step(config, device)
        if peer == "torchtitan"
        else transformers_step(config, device, peer.endswith("compiled"))
    )
    seconds = []
    for number in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if number >= 2:
            seconds.append(time.perf_counter() - start)
    return {"ms": statistics.median(seconds) * 1000, "memory_bytes": torch.cuda.max_memory_allocated()}


def torchtitan_step(config: Config, device: torch.device) -> Callable[[], None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed.utils import clip_grad_norm_

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("fsdp",))
    build = torchtitan_moe if config.model.num_experts else torchtitan_llama
    transformer = build(config, mesh)
    transformer.to_empty(device=device)
    with torch.no_grad():
        transformer.init_weights(buffer_device=device)
    transformer.train()
    loss = torch.compile(cross_entropy_loss)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    size, sequence = config.train.micro_batch, config.data.seq_len
    tokens = torch.randint(0, config.model.vocab, (size, sequence), device=device)
    count = config.train.global_batch * sequence

    def step() -> None:
        for _ in range(config.train.global_batch // size):
            pred = transformer(tokens)
            part = loss(pred, tokens) / count
            del pred  # like torchtitan, so that logits are freed before backward
            part.backward()
        clip_grad_norm_(list(transformer.parameters()), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torchtitan_llama(config: Config, mesh: Any) -> torch.nn.Module:
    from torchtitan.config.job_config import Compile
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.infra.parallelize import apply_compile, apply_fsdp

    model = config.model
    assert isinstance(model, LlamaConfig)
    # torchtitan computes the MLP width: 8/3 of the hidden size times a factor, rounded up.
    sizes = TransformerModelArgs(
        dim=model.hidden, n_layers=model.layers, n_heads=model.heads, n_kv_heads=model.num_kv_heads,
        vocab_size=model.vocab, multiple_of=128, max_seq_len=config.data.seq_len,
        ffn_dim_multiplier=model.ffn / (8 * model.hidden / 3) if model.ffn > 3 * model.hidden else None,
    )  # fmt: skip
    with torch.device("meta"):
        transformer = Transformer(sizes)
    assert transformer.layers["0"].feed_forward.w1.weight.shape[0] == model.ffn
    apply_compile(transformer, Compile(enable=True))
    apply_fsdp(transformer, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    return transformer


def torchtitan_moe(config: Config, mesh: Any) -> torch.nn.Module:
    """torchtitan's Qwen3 with the same routing as trainyard's, without its balancing bias."""
    from torchtitan.config.job_config import Compile
    from torchtitan.models.llama4.infra.parallelize import apply_compile, apply_fsdp
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs

    model = config.model
    assert isinstance(model, Qwen3MoeConfig)
    routing = MoEArgs(
        num_experts=model.experts, num_shared_experts=0, top_k=model.top_k, score_func="softmax", route_norm=True,
        score_before_experts=False, load_balance_coeff=None,
    )  # fmt: skip
    sizes = Qwen3ModelArgs(
        dim=model.hidden, n_layers=model.layers, n_heads=model.heads, n_kv_heads=model.num_kv_heads,
        vocab_size=model.vocab, head_dim=model.head_size, hidden_dim=model.ffn, max_seq_len=config.data.seq_len,
        moe_enabled=True, moe_inter_dim=model.ffn, moe_args=routing,
    )  # fmt: skip
    with torch.device("meta"):
        transformer = Qwen3Model(sizes)
    apply_compile(transformer, Compile(enable=True), False)
    apply_fsdp(transformer, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    return transformer


def transformers_step(config: Config, device: torch.device, compiled: bool) -> Callable[[], None]:
    import transformers

    settings = {key: value for key, value in to_hf(config.model).items() if "dtype" not in key}
    cls = getattr(transformers, settings["architectures"][0])
    torch.manual_seed(0)
    with device:  # initializing 7B on a CPU takes a minute
        model = cls(cls.config_class(**settings, attn_implementation="sdpa")).to(torch.bfloat16)
    model.train()
    weights = list(model.parameters())
    masters = [weight.detach().float().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model, dynamic=False) if compiled else model
    size, sequence, vocab = config.train.micro_batch, config.data.seq_len, config.model.vocab
    tokens = torch.randint(0, vocab, (size, sequence), device=device)
    inputs = {"input_ids": tokens, "labels": tokens}
    if config.model.family == "bert":
        labels = torch.full_like(tokens, -100)
        labels[:, : config.data.max_predictions] = tokens[:, : config.data.max_predictions]
        inputs |= {
            "attention_mask": torch.ones_like(tokens),
            "token_type_ids": torch.zeros_like(tokens),
            "labels": labels,
            "next_sentence_label": torch.zeros(size, dtype=torch.long, device=device),
        }
    micro_batches = config.train.global_batch // size

    def step() -> None:
        for _ in range(micro_batches):
            (run(**inputs).loss / micro_batches).backward()
        for weight, master in zip(weights, masters, strict=True):
            master.grad = weight.grad.float() if weight.grad is not None else None
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)

    return step


def run_peer(peer: str, case: str) -> dict[str, float] | str:
    run = [sys.executable, __file__, "--case", case, "--peer", peer]
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(run, capture_output=True, text=True, env=environment)
    if done.returncode:
        return "out of memory" if "OutOfMemoryError" in done.stderr else done.stderr.strip().splitlines()[-1]
    return json.loads(done.stdout.splitlines()[-1])


def with_throughput(config: Config, found: dict[str, float]) -> dict[str, float]:
    """Return the measurement with throughput and MFU added."""
    blueprint = models.family_of(config.model).blueprint(config.model)
    flops = flops_per_sample(config.model, blueprint, config.data.seq_len, config.data.max_predictions)
    samples = config.train.global_batch / found["ms"] * 1000
    out = {**found, "sequences_per_second": samples, "tokens_per_second": samples * config.data.seq_len}
    peak = devices.select("auto").peak_throughput(torch.bfloat16)
    if peak:
        out |= {
            "mfu_full": samples * flops.full_attention / peak.flops,
            "mfu_causal": samples * flops.causal_attention / peak.flops,
        }
    return out


def describe_machine() -> dict[str, Any]:
    query = "name,clocks.sm,clocks.max.sm,clocks.mem,power.limit,driver_version"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True).stdout.strip().split(", ")
    return dict(zip(query.split(","), told, strict=False)) | {
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="repeatable")
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override ours")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the results to this file as JSON, next to those of other cases")
    arguments = parser.parse_args()
    if arguments.peer:
        print(json.dumps(time_peer(arguments.peer, arguments.case[0])))
        return
    results: dict[str, Any] = {}
    if arguments.out and arguments.out.exists():
        results = json.loads(arguments.out.read_text())
    print(json.dumps(describe_machine()))
    for case in arguments.case or CASES:
        config = parse(json.loads(json.dumps(CASES[case])), arguments.set)
        rows: dict[str, Any] = {"trainyard": with_throughput(config, run_trainyard(case, arguments.set))}
        if not arguments.only_ours and not case.endswith("fp8"):
            for peer in PEERS:
                has_model = config.model.family in ("llama", "qwen3_moe")
                if peer == "torchtitan" and not (has_model and find_spec("torchtitan")):
                    continue
                found = run_peer(peer, case)
                rows[peer] = found if isinstance(found, str) else with_throughput(config, found)
        results[case] = {"machine": describe_machine(), "overrides": arguments.set, "rows": rows}
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=2) + "\n")
        print(f"{case}: batch {config.train.global_batch} x {config.data.seq_len}, micro batch "
              f"{config.train.micro_batch}, {config.precision.kind}", flush=True)  # fmt: skip
        for name, row in rows.items():
            if isinstance(row, str):
                print(f"  {name:22} {row}")
                continue
            mfu = f"MFU {row['mfu_full']:.1%} full, {row['mfu_causal']:.1%} causal" if "mfu_full" in row else ""
            ratio = rows["trainyard"]["tokens_per_second"] / row["tokens_per_second"]
            print(
                f"  {name:22} {row['ms']:9.1f} ms {row['tokens_per_second']:10,.0f} tokens/s"
                f" {row['sequences_per_second']:9,.1f} seq/s  {mfu}  {row['memory_bytes'] / 2**30:.1f} GiB"
                + (
                    f"  trainyard is {ratio:.2f}x"
                    if name != "trainyard"
                    else f"  first step {row['first_step_seconds']:.1f} s"
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
