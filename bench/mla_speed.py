"""Training and decoding of a DeepSeek-V3 shape with 3B weights on one GPU, beside transformers in the same run.

    python bench/mla_speed.py --out bench/results/mla-h200.json        every case, each in its own process
    python bench/mla_speed.py --case train --set recompute.kind=none
    python bench/mla_speed.py --tiny                                   shows that it works, on a CPU too

The shape is that of recipes/deepseek-v3-3b.yaml without the block of further tokens, which transformers does not train.
Both train in bf16 with fp32 master weights and AdamW on random tokens; MFU counts the weights that a token uses and the
pairs that the causal mask keeps. Decoding is greedy, 32 sequences of `PROMPT` tokens each; `cache_mib` is what both
keep of the tokens. Times are the median of the steps after the first ones.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
GPU = torch.cuda.is_available()
WARMUP_STEPS, STEPS, LR = 4, 12, 1e-4
BATCH, SEQ_LEN, DECODE_BATCH, PROMPT, NEW_TOKENS = 8, 4096, 32, 4096, 64
SHAPE: dict[str, Any] = {
    "family": "deepseek_v3", "vocab": 65_536, "hidden": 2048, "layers": 16, "heads": 16, "q_lora_rank": 1024,
    "ffn": 768, "shared_ffn": 768, "dense_layers": "0", "dense_ffn": 6144, "experts": 32, "top_k": 4,
    "expert_groups": 4, "top_k_groups": 2, "routed_scale": 2.5, "max_positions": 8192,
}  # fmt: skip
TINY = {
    **SHAPE, "vocab": 512, "hidden": 64, "layers": 2, "heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "ffn": 32,
    "shared_ffn": 32, "dense_ffn": 64, "experts": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
COMPARED = {"train": "peer-train", "train-mtp": "train", "decode": "peer-decode"}


def sizes(tiny: bool) -> tuple[dict[str, Any], int, int, int, int]:
    """The model; batch and sequence length of training; prompt and new tokens of decoding."""
    return (TINY, 2, 64, 32, 8) if tiny else (SHAPE, BATCH, SEQ_LEN, PROMPT, NEW_TOKENS)


def measure(step: Callable[[int], float], tokens: int, flops: float) -> dict[str, float]:
    """`step` trains one step and returns its loss, which waits for the device."""
    times, losses = [], []
    for index in range(WARMUP_STEPS + STEPS):
        start = time.perf_counter()
        losses.append(step(index))
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[WARMUP_STEPS:])
    result = {"tokens_per_s": tokens / seconds, "tflops": flops / seconds / 1e12, "last_loss": losses[-1]}
    if GPU:
        from trainyard import devices

        peak = devices.select("auto").peak_throughput(torch.bfloat16)
        result |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}
        result |= {"mfu": flops / seconds / peak.flops} if peak else {}
    return result


def step_flops(model: Any, batch: int, seq_len: int) -> float:
    from trainyard.families import blueprint_of
    from trainyard.families.flops import flops_per_sample

    return batch * flops_per_sample(model, blueprint_of(model), seq_len, 0).causal_attention


def train_ours(tiny: bool, overrides: list[str], **model: Any) -> dict[str, float]:
    from trainyard import Trainer
    from trainyard.config.load import parse

    shape, batch, seq_len, _, _ = sizes(tiny)
    sections: dict[str, Any] = {
        "model": {**shape, **model},
        "precision": {"kind": "bf16"},
        "log": {"loggers": []},
        "data": {"source": "synthetic", "seq_len": seq_len},
        "train": {"steps": WARMUP_STEPS + STEPS, "global_batch": batch, "micro_batch": batch},
    }
    trainer = Trainer(parse(sections, overrides))
    for part in trainer.models:
        part.train()

    def step(index: int) -> float:
        result = trainer.train_step(trainer.loader.batch(index, trainer.batch_slice), index + 1, LR)
        return float(result.loss)

    return measure(step, batch * seq_len, step_flops(trainer.config.model, batch, seq_len))


def peer_model(tiny: bool) -> tuple[Any, Any]:
    """transformers' model in bf16 with random weights, and our section of it."""
    import transformers

    from trainyard.families.builtin.deepseek_v3 import DeepseekV3Config
    from trainyard.families.hf_config import to_hf

    section = DeepseekV3Config.model_validate(sizes(tiny)[0])
    config = transformers.AutoConfig.for_model(**to_hf(section))
    torch.manual_seed(0)
    with torch.device("cuda" if GPU else "cpu"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), section


def train_peer(tiny: bool) -> dict[str, float]:
    """transformers compiled, with grouped experts where it has them, fp32 master weights, torch's fused AdamW."""
    model, section = peer_model(tiny)
    _, batch, seq_len, _, _ = sizes(tiny)
    model.gradient_checkpointing_disable()
    if GPU:
        model.set_experts_implementation("grouped_mm")
    masters = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=GPU)
    tokens = torch.randint(section.vocab, (batch, seq_len), device=model.device)
    compiled = torch.compile(model) if GPU else model
    model.train()

    def step(index: int) -> float:
        loss = compiled(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.float()
            optimizer.step()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        model.zero_grad()
        return float(loss)

    return measure(step, batch * seq_len, step_flops(section, batch, seq_len))


def decode_ours(tiny: bool) -> dict[str, float]:
    from trainyard import devices, models
    from trainyard.families.builtin.deepseek_v3 import DeepseekV3Config
    from trainyard.inference.build_engine import EngineShape, build_engine, cache_bytes
    from trainyard.inference.sampling import StepNeeds
    from trainyard.models.init import initial_values
    from trainyard.parallel.process_group import Group

    shape, _, _, prompt, new = sizes(tiny)
    section = DeepseekV3Config.model_validate(shape)
    device = devices.select("auto")
    device.prepare(False)
    values = initial_values(models.blueprint_of(section), 0, device.torch_device)
    dtype, length = torch.bfloat16 if GPU else torch.float32, prompt + new + 1
    engine_shape = EngineShape(DECODE_BATCH, length, dtype)
    engine = build_engine(section, device, Group(), engine_shape, lambda name: values(name).to(dtype))
    needs = StepNeeds()
    rows = torch.randint(section.vocab, (DECODE_BATCH, prompt)).tolist()
    for slot, row in enumerate(rows):
        engine.prefill([slot], [row], 0, True, needs)()  # type: ignore[misc]
    times = []
    for index in range(new - 2):
        start = time.perf_counter()
        engine.decode(DECODE_BATCH, prompt + index + 1, needs)()
        times.append(time.perf_counter() - start)
    cache = cache_bytes(section, 1, DECODE_BATCH, length, dtype.itemsize, False)
    return {"tokens_per_s": DECODE_BATCH / statistics.median(times[WARMUP_STEPS:]), "cache_mib": cache / 2**20}


def decode_peer(tiny: bool) -> dict[str, float]:
    model, section = peer_model(tiny)
    _, _, _, prompt, new = sizes(tiny)
    tokens = torch.randint(section.vocab, (DECODE_BATCH, prompt), device=model.device)
    times = []
    with torch.inference_mode():
        cache, token = model(input_ids=tokens, use_cache=True, logits_to_keep=1).past_key_values, tokens[:, -1:]
        for _ in range(new - 2):
            if GPU:
                torch.cuda.synchronize()
            start = time.perf_counter()
            token = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)[:, None]
            token.tolist()
            times.append(time.perf_counter() - start)
    kept = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    return {"tokens_per_s": DECODE_BATCH / statistics.median(times[WARMUP_STEPS:]), "cache_mib": kept / 2**20}


CASES: dict[str, Callable[[bool, list[str]], dict[str, float]]] = {
    "train": train_ours,
    "train-mtp": lambda tiny, overrides: train_ours(tiny, overrides, mtp_layers=1),
    "peer-train": lambda tiny, overrides: train_peer(tiny),
    "decode": lambda tiny, overrides: decode_ours(tiny),
    "peer-decode": lambda tiny, overrides: decode_peer(tiny),
}


def run_case(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case in a process of its own."""
    command = [sys.executable, __file__, "--case", name, "--child", *(["--tiny"] if options.tiny else [])]
    command += [argument for override in options.set for argument in ("--set", override)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="keys of our configuration")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sys.path.insert(0, str(ROOT))
        result = CASES[options.case[0]](options.tiny, options.set)
        print(json.dumps({key: round(value, 3) for key, value in result.items()}))
        return
    device = torch.cuda.get_device_name() if GPU else platform.machine()
    results: dict[str, Any] = {"device": device, "torch": torch.__version__, "set": options.set, "cases": {}}
    cases = results["cases"]
    for name in options.case or CASES:
        cases[name] = run_case(name, options)
        print(f"{name:14} " + "  ".join(f"{key} {value}" for key, value in cases[name].items()), flush=True)
        other = next((case for case, peer in COMPARED.items() if peer == name), name)
        speeds = [cases.get(case, {}).get("tokens_per_s") for case in (other, COMPARED.get(other))]
        if all(speeds):
            cases[other]["ratio"] = round(speeds[0] / speeds[1], 2)
            print(f"{other} / {COMPARED[other]}: {cases[other]['ratio']}")
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
