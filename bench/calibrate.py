"""Fit the few constants of `trainyard plan` to measured speeds, and show how far off each prediction is.

    python bench/calibrate.py    each run predicted with constants fitted to the others, as in docs/lab/plan-accuracy.md

trn1: aws-neuron-sdk, about-neuron/benchmarks/trn1/*.csv and earlier versions of them (general/benchmarks/trn1). If
several releases of Neuron list a run, this is the last figure for the current layout. GPT 6.7B: the tutorial of the
Megatron-LM reference. Llama 3 70B: the log of NxD Training's tutorial (321.9 s a step). Layouts and recompute are those
of the scripts that these pages link to. H200: docs/lab/performance.md and bench/results/gpu-h200.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.parallel.layout import Layout
from trainyard.plan.hardware.spec import Hardware, parse_hardware
from trainyard.plan.time.efficiency import Efficiency
from trainyard.plan.time.step_time import predict_step


@dataclass(frozen=True)
class PublishedRun:
    name: str
    hardware_name: str
    """Hardware in the form of --hardware."""
    sections: dict[str, Any]
    sequences_per_second: float
    source: str

    @property
    def hardware(self) -> Hardware:
        return parse_hardware(self.hardware_name)

    def config(self) -> Config:
        return parse({**self.sections, "data": {"source": "synthetic", **self.sections["data"]}})


def _llama(vocab: int, hidden: int, layers: int, heads: int, kv: int, ffn: int, seq_len: int) -> dict[str, Any]:
    return {
        "model": {
            "family": "llama", "vocab": vocab, "hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv,
            "ffn": ffn, "max_positions": seq_len,
        },
        "data": {"seq_len": seq_len},
        "train": {"steps": 1000, "global_batch": 1024, "micro_batch": 1},
        "precision": {"kind": "bf16"},
        "recompute": {"kind": "attention"},
    }  # fmt: skip


def _merge_sections(sections: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {name: {**sections.get(name, {}), **more.get(name, {})} for name in sections | more}


def _layout(tp: int, pp: int = 1) -> dict[str, Any]:
    return {"tp": tp, "pp": pp, "sequence_parallel": True, "zero": 1}


LLAMA2_7B = _llama(32000, 4096, 32, 32, 32, 11008, 4096)
LLAMA2_13B = _llama(32000, 5120, 40, 40, 40, 13824, 4096)
LLAMA2_70B = _llama(32000, 8192, 80, 64, 8, 28672, 4096)
LLAMA3_8B = _llama(128256, 4096, 32, 32, 8, 14336, 8192)
LLAMA3_70B = _llama(128256, 8192, 80, 64, 8, 28672, 8192)
GPT: dict[str, Any] = {
    "model": {"family": "gpt", "vocab": 50257, "hidden": 4096, "layers": 32, "heads": 32, "max_positions": 2048},
    "data": {"seq_len": 2048},
    "train": {"steps": 1000, "global_batch": 64, "micro_batch": 1},
    "precision": {"kind": "bf16_sr"},
    "layout": {"tp": 8},
}
BERT: dict[str, Any] = {
    "model": {"family": "bert", "vocab": 30522, "hidden": 1024, "layers": 24, "heads": 16, "max_positions": 512},
    "data": {"seq_len": 128, "max_predictions": 20},
    "train": {"steps": 1000, "global_batch": 16384, "micro_batch": 16},
    "precision": {"kind": "bf16_sr"},
}
CODER = _merge_sections(
    _llama(32256, 2048, 24, 16, 16, 5504, 4096),
    train={"global_batch": 32, "micro_batch": 8},
    recompute={"kind": "none"},
)
ONE_NODE, NODES_16, NODES_32 = "trn1.32xlarge:1", "trn1.32xlarge:16", "trn1.32xlarge:32"
TRN1_RUNS = (
    PublishedRun("GPT 6.7B, 1 node", ONE_NODE, GPT, 7.3, "Megatron-LM reference, tutorial"),
    PublishedRun("GPT 6.7B, 16 nodes", NODES_16, _merge_sections(GPT, train={"global_batch": 1024}), 98.0, "the same"),
    PublishedRun("Llama 2 7B, 16 nodes", NODES_16, _merge_sections(LLAMA2_7B, layout=_layout(8)), 95.14, "Neuron 2.21"),
    PublishedRun(
        "Llama 2 13B, 32 nodes",
        NODES_32,
        _merge_sections(LLAMA2_13B, layout=_layout(8, 4)),
        80.33,
        "aws-neuron-sdk, last stated",
    ),
    PublishedRun(
        "Llama 2 70B, 32 nodes",
        NODES_32,
        _merge_sections(LLAMA2_70B, layout=_layout(32, 8)),
        14.44,
        "aws-neuron-sdk, last stated",
    ),
    PublishedRun(
        "Llama 3.1 8B, 32 nodes", NODES_32, _merge_sections(LLAMA3_8B, layout=_layout(32)), 47.95, "Neuron 2.24"
    ),
    PublishedRun(
        "Llama 3.1 70B, 32 nodes", NODES_32, _merge_sections(LLAMA3_70B, layout=_layout(32, 8)), 7.94, "Neuron 2.24"
    ),
    PublishedRun(
        "Llama 3 70B, 16 nodes",
        NODES_16,
        _merge_sections(
            LLAMA3_70B, layout=_layout(32, 8), recompute={"kind": "selective", "modules": ["core_attention", "mlp"]}
        ),
        1024 / 321.9,
        "NxD Training, tutorial",
    ),
    PublishedRun("BERT phase 1, 1 node", ONE_NODE, BERT, 3826.6, "Neuron 2.28"),
    PublishedRun(
        "BERT phase 1, 16 nodes",
        NODES_16,
        _merge_sections(BERT, train={"global_batch": 1048576}, optimizer={"kind": "lamb"}),
        57407.9,
        "Neuron 2.28",
    ),
)
H200_RUNS = (
    PublishedRun("1.3B bf16", "h200:1", CODER, 62472 / 4096, "gpu-h200.json"),
    PublishedRun(
        "1.3B fp8", "h200:1", _merge_sections(CODER, precision={"kind": "fp8"}), 80279 / 4096, "gpu-h200.json"
    ),
    PublishedRun(
        "BERT-large phase 1",
        "h200:1",
        _merge_sections(BERT, train={"global_batch": 2048, "micro_batch": 512}, precision={"kind": "bf16"}),
        2742.0,
        "gpu-h200.json",
    ),
    PublishedRun(
        "Llama 2 7B",
        "h200:1",
        _merge_sections(LLAMA2_7B, train={"global_batch": 16}, recompute={"kind": "none"}),
        13469 / 4096,
        "docs/lab/performance.md",
    ),
)
RUN_SETS = {"trn1": TRN1_RUNS, "h200": H200_RUNS}
FITTED_CONSTANTS = {
    "trn1": (("matmul", "attention"), ("memory",), ("link",), ("network",)),
    "h200": (("matmul",), ("attention",), ("memory",)),
}
"""The constants that are fitted to each set of runs. Names in one tuple share a value."""


def predicted_speed(run: PublishedRun, efficiency: Efficiency) -> float:
    """Sequences per second."""
    config = run.config()
    layout = Layout.from_config(config, run.hardware.ranks)
    return config.train.global_batch / predict_step(config, layout, run.hardware, efficiency).seconds


@cache
def _time_shares(set_name: str, index: int) -> tuple[float, ...]:
    """Seconds of a step that are inversely proportional to each fitted constant, and seconds that depend on none."""
    run = RUN_SETS[set_name][index]
    batch = run.config().train.global_batch
    at_peak = batch / predicted_speed(run, Efficiency())
    shares = []
    for names in FITTED_CONSTANTS[set_name]:
        half = Efficiency()._replace(**dict.fromkeys(names, 0.5))
        shares.append(batch / predicted_speed(run, half) - at_peak)
    return *shares, at_peak - sum(shares)


def fit_efficiency(set_name: str, without: int | None = None) -> Efficiency:
    """The constants with the least mean square of relative errors over the set's runs, except run `without`. None of
    them is above 1: nothing is faster than its peak."""
    rows, targets = [], []
    for index, run in enumerate(RUN_SETS[set_name]):
        if index == without:
            continue
        measured = run.config().train.global_batch / run.sequences_per_second
        *shares, fixed = _time_shares(set_name, index)
        rows.append([share / measured for share in shares])
        targets.append(1 - fixed / measured)
    solution = _least_squares(np.array(rows), np.array(targets))
    groups = zip(FITTED_CONSTANTS[set_name], solution, strict=True)
    return Efficiency(**{name: float(1 / value) for names, value in groups for name in names})


def _least_squares(a: Any, b: Any) -> Sequence[float]:
    """The x >= 1 for which a x is closest to b: the best over all choices of components that are fixed at 1."""
    candidates = []
    for free in product((False, True), repeat=a.shape[1]):
        mask = np.array(free)
        x = np.ones(a.shape[1])
        if mask.any():
            x[mask] = np.linalg.lstsq(a[:, mask], b - a[:, ~mask].sum(1), rcond=None)[0]
        if (x >= 1).all():
            candidates.append((float(((a @ x - b) ** 2).sum()), list(x)))
    return min(candidates)[1]


@dataclass(frozen=True)
class HeldOutPrediction:
    """A run predicted with constants fitted to the other runs."""

    run: PublishedRun
    predicted: float
    """Sequences per second."""
    constants: Efficiency

    @property
    def error(self) -> float:
        return self.predicted / self.run.sequences_per_second - 1


def leave_one_out(set_name: str) -> list[HeldOutPrediction]:
    predictions = []
    for index, run in enumerate(RUN_SETS[set_name]):
        constants = fit_efficiency(set_name, index)
        predictions.append(HeldOutPrediction(run, predicted_speed(run, constants), constants))
    return predictions


def main() -> None:
    for name in RUN_SETS:
        predictions = leave_one_out(name)
        print(f"\n{name}: constants fitted to all runs: {_format_constants(fit_efficiency(name))}\n")
        print("| run | measured, sequences/s | predicted without it | error | constants without it | source |")
        print("|---|---|---|---|---|---|")
        for prediction in predictions:
            run = prediction.run
            measured, predicted = _format_speed(run.sequences_per_second), _format_speed(prediction.predicted)
            constants = _format_constants(prediction.constants)
            print(f"| {run.name} | {measured} | {predicted} | {prediction.error:+.1%} | {constants} | {run.source} |")
        errors = [abs(prediction.error) for prediction in predictions]
        print(f"\nmedian error {median(errors):.1%}, worst {max(errors):.1%}")


def _format_speed(speed: float) -> str:
    return f"{speed:,.0f}" if speed > 1000 else f"{speed:.4g}"


def _format_constants(efficiency: Efficiency) -> str:
    """Matrix products, attention, memory, link, network."""
    return " ".join(f"{value:.2f}" for value in efficiency)


if __name__ == "__main__":
    main()
