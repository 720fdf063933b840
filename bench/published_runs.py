"""Training speeds that others published for trn1.32xlarge, with their layouts, and our own on an H200.

aws-neuron-sdk: the tables training_data_encoder.csv and training_data_decoder.csv in about-neuron/benchmarks/trn1 and
general/benchmarks/trn1, and trn1_trn1n_nlp_data.csv before them. Every run with a model and a layout of these tables
is here once per layout, with the last figure stated for it and the release of Neuron that stated it. Model shapes,
recompute and ZeRO are those of the scripts that the tables link to (neuronx-distributed, neuronx-nemo-megatron, the
BERT tutorial). Not here, because node count and topology contradict each other: the Llama 2 rows of NeMo Megatron (7B
on 32 nodes and 13B on 16, both as TP 8, PP 4, DP 4: 128 of 1024 or 512 ranks).

GPT 6.7B on one node: the tutorial of the Megatron-LM reference. Llama 3 70B on 16 nodes: the log of NxD Training's
tutorial (321.9 s a step). H200: docs/lab/performance.md and bench/results/gpu-h200.json.
"""

from dataclasses import dataclass, replace
from typing import Any

from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.preflight.plan.hardware.spec import Hardware, parse_hardware


@dataclass(frozen=True)
class PublishedRun:
    name: str
    hardware_name: str
    """Hardware in the form of --hardware."""
    sections: dict[str, Any]
    sequences_per_second: float
    source: str
    multiplies_in_bf16: bool = False
    """An fp32 run whose matrix products the compiler casts to bf16: the default of neuronx-cc, not of trainyard."""

    @property
    def hardware(self) -> Hardware:
        hardware = parse_hardware(self.hardware_name)
        if self.multiplies_in_bf16:
            return replace(hardware, entry=replace(hardware.entry, fp32_flops=hardware.entry.bf16_flops))
        return hardware

    def config(self) -> Config:
        return parse({**self.sections, "data": {"source": "synthetic", **self.sections["data"]}})


def _merge_sections(sections: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {name: {**sections.get(name, {}), **more.get(name, {})} for name in sections | more}


def _model(family: str, vocab: int, hidden: int, layers: int, heads: int, seq_len: int, **more: Any) -> dict[str, Any]:
    shape = {"vocab": vocab, "hidden": hidden, "layers": layers, "heads": heads, "max_positions": seq_len, **more}
    return {
        "model": {"family": family, **shape},
        "data": {"seq_len": seq_len},
        "train": {"steps": 1000, "global_batch": 1024, "micro_batch": 1},
    }


def _llama(
    vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, seq_len: int, tp: int = 1, pp: int = 1
) -> dict[str, Any]:
    model = _model("llama", vocab, hidden, layers, heads, seq_len, kv_heads=kv_heads, ffn=ffn)
    layout = {"tp": tp, "pp": pp, "sequence_parallel": tp > 1, "zero": 1}
    return model | {"precision": {"kind": "bf16"}, "recompute": {"kind": "attention"}, "layout": layout}


def _gpt(hidden: int, layers: int, heads: int, tp: int, pp: int, recompute: str) -> dict[str, Any]:
    layout = {"tp": tp, "pp": pp, "sequence_parallel": True}
    model = _model("gpt", 50257, hidden, layers, heads, 2048)
    return model | {"precision": {"kind": "bf16_sr"}, "recompute": {"kind": recompute}, "layout": layout}


def _bert(global_batch: int, micro_batch: int, optimizer: str, seq_len: int = 128, kind: str = "bf16_sr") -> Any:
    sections = _model("bert", 30522, 1024, 24, 16, 512) | {"data": {"seq_len": seq_len, "max_predictions": 20}}
    if seq_len > 128:
        sections["data"]["max_predictions"] = 80
    train = {"global_batch": global_batch, "micro_batch": micro_batch}
    return _merge_sections(sections, train=train, precision={"kind": kind}, optimizer={"kind": optimizer})


LLAMA2_7B = (32000, 4096, 32, 32, 32, 11008, 4096)
LLAMA2_13B = (32000, 5120, 40, 40, 40, 13824, 4096)
LLAMA2_70B = (32000, 8192, 80, 64, 8, 28672, 4096)
LLAMA3_8B = (128256, 4096, 32, 32, 8, 14336, 8192)
LLAMA3_70B = (128256, 8192, 80, 64, 8, 28672, 8192)
GPT_6_7B = _gpt(4096, 32, 32, 8, 1, "none") | {"layout": {"tp": 8}}
CODER = _merge_sections(
    _llama(32256, 2048, 24, 16, 16, 5504, 4096),
    train={"global_batch": 32, "micro_batch": 8},
    recompute={"kind": "none"},
)
ONE_NODE, NODES_16, NODES_32 = "trn1.32xlarge:1", "trn1.32xlarge:16", "trn1.32xlarge:32"
_SELECTIVE = {"kind": "selective", "modules": ["core_attention", "mlp"]}
# fmt: off
TRN1_RUNS = tuple(PublishedRun(*row) for row in (
    ("GPT 6.7B, 1 node, TP8", ONE_NODE, _merge_sections(GPT_6_7B, train={"global_batch": 64}), 7.3,
     "Megatron-LM reference, tutorial"),
    ("GPT 6.7B, 16 nodes, TP8", NODES_16, GPT_6_7B, 141.57, "Neuron 2.12"),
    ("GPT 23B, 32 nodes, TP8 PP4", NODES_32, _gpt(8192, 28, 64, 8, 4, "attention"), 107.18, "Neuron 2.18"),
    ("GPT 46B, 32 nodes, TP8 PP8", NODES_32, _gpt(8192, 56, 64, 8, 8, "full"), 48.24, "Neuron 2.18"),
    ("GPT 175B, 32 nodes, TP32 PP8", NODES_32, _gpt(12288, 96, 96, 32, 8, "attention"), 14.60, "Neuron 2.18"),
    ("Llama 2 7B, 16 nodes, TP8", NODES_16, _llama(*LLAMA2_7B, tp=8), 95.14, "Neuron 2.21"),
    ("Llama 2 13B, 32 nodes, TP8 PP4", NODES_32, _llama(*LLAMA2_13B, tp=8, pp=4), 81.8, "Neuron 2.17"),
    ("Llama 2 13B, 32 nodes, TP8 PP8", NODES_32, _llama(*LLAMA2_13B, tp=8, pp=8), 80.33, "Neuron 2.21"),
    ("Llama 2 70B, 32 nodes, TP32 PP4", NODES_32, _llama(*LLAMA2_70B, tp=32, pp=4), 17.86, "Neuron 2.18"),
    ("Llama 2 70B, 32 nodes, TP32 PP8", NODES_32, _llama(*LLAMA2_70B, tp=32, pp=8), 14.44, "Neuron 2.21"),
    ("Llama 3.1 8B, 32 nodes, TP32", NODES_32, _merge_sections(_llama(*LLAMA3_8B, tp=32), layout={"zero": 0}), 53.51,
     "Neuron 2.21"),
    ("Llama 3.1 8B, 32 nodes, TP32 ZeRO-1", NODES_32, _llama(*LLAMA3_8B, tp=32), 47.95, "Neuron 2.24"),
    ("Llama 3.1 70B, 32 nodes, TP32 PP8", NODES_32, _llama(*LLAMA3_70B, tp=32, pp=8), 7.94, "Neuron 2.24"),
    ("Llama 3 70B, 16 nodes, TP32 PP8", NODES_16,
     _merge_sections(_llama(*LLAMA3_70B, tp=32, pp=8), recompute=_SELECTIVE), 1024 / 321.9, "NxD Training, tutorial"),
    ("BERT phase 1, 1 node, AdamW", ONE_NODE, _bert(16384, 16, "adamw"), 3826.6, "Neuron 2.28"),
    ("BERT phase 1, 1 node, LAMB", ONE_NODE, _bert(65536, 16, "lamb"), 4137.9, "Neuron 2.21"),
    ("BERT phase 1, 16 nodes, LAMB", NODES_16, _bert(1048576, 16, "lamb"), 57407.9, "Neuron 2.28"),
    ("BERT phase 1, 16 nodes, AdamW, AMP", NODES_16, _bert(16384, 16, "adamw", kind="bf16"), 26069.4, "Neuron 2.21"),
    ("BERT phase 1, 16 nodes, LAMB, fp32", NODES_16, _bert(1048576, 8, "lamb", kind="fp32"), 32362.7, "Neuron 2.28",
     True),
    ("BERT phase 2, 16 nodes, LAMB", NODES_16, _bert(524288, 2, "lamb", 512), 7832.4, "Neuron 2.21"),
))
H200_RUNS = tuple(PublishedRun(*row) for row in (
    ("1.3B bf16", "h200:1", CODER, 62472 / 4096, "gpu-h200.json"),
    ("1.3B fp8", "h200:1", _merge_sections(CODER, precision={"kind": "fp8"}), 80279 / 4096, "gpu-h200.json"),
    ("BERT-large phase 1", "h200:1", _bert(2048, 512, "adamw", kind="bf16"), 2742.0, "gpu-h200.json"),
    ("Llama 2 7B", "h200:1",
     _merge_sections(_llama(*LLAMA2_7B), train={"global_batch": 16}, recompute={"kind": "none"}), 13469 / 4096,
     "docs/lab/performance.md"),
))
# fmt: on
