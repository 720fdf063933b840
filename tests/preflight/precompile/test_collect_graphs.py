"""Tracing graphs for a device with fused kernels and compilers that do not survive a fork. A CPU stands in for the GPU,
with its kernels in Triton's interpreter."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import _dynamo

from tests.support import configs
from tests.support.compiler import install_unoptimized_compiler
from trainyard import compat
from trainyard.devices.cpu import CpuDevice
from trainyard.kernels.triton.ops import TritonKernels
from trainyard.preflight.dryrun.meta_ops import fake_tensor_mode
from trainyard.preflight.precompile.collect_graphs import CollectRequest, collect_graphs
from trainyard.run.trainer import Trainer
from trainyard.train.compile import inductor_cache
from trainyard.train.micro_batches import split

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, the interpreter is off")


@pytest.mark.nightly
def test_one_graph_serves_all_lengths_of_bert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT's micro batches have no padding, so they have many lengths. After tracing, a run compiles nothing."""
    monkeypatch.setenv(inductor_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(inductor_cache.TORCH_CACHE_VARIABLE, "")  # restored afterwards
    monkeypatch.delenv(inductor_cache.TORCH_CACHE_VARIABLE)
    install_unoptimized_compiler(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(CpuDevice, "kernels", lambda self, fused=True: TritonKernels())
    monkeypatch.setattr(CpuDevice, "fork_safe", False)
    monkeypatch.setattr(CpuDevice, "synchronous", False)
    monkeypatch.setattr(split, "PACKED_LENGTH_MULTIPLE", 2)
    config = configs.tiny_config(
        {**configs.BERT, "layers": 3, "heads": 2},
        compile={"enabled": True},
        precision={"kind": "bf16"},
        data={"validation_fraction": 0.1},
        evaluate={"every": 1, "batches": 1},
        train={"steps": 1, "global_batch": 4, "micro_batch": 2},
        log={"directory": str(tmp_path)},
    )
    messages: list[dict[str, Any]] = []
    torch.compiler.reset()
    with _dynamo.config.patch(automatic_dynamic_shapes=True), monkeypatch.context() as patched:  # restored afterwards
        # As torch 2.11 does on a GPU: each block asks for its graph again.
        patched.setattr(torch._TorchCompileWrapper, "__eq__", lambda one, other: one is other)
        collect_graphs(CollectRequest(config.model_dump(mode="json"), 0, 1, 0, 2), messages.append)
    assert not [message for message in messages if message.get("problem")]
    assert messages[-1]["state"] == "complete"
    graphs = [message["name"] for message in messages if message["state"] == "compiling"]
    assert graphs.count("evaluate: bert.forward, forward") == 1

    torch.compiler.reset()
    before = compat.compile_counts()
    with _dynamo.config.patch(automatic_dynamic_shapes=True):
        trainer = Trainer(config)
        micro_batches_ = trainer.runner.stage_batch(trainer.loader.batch(0))
        assert len({part["tokens"].shape[1] for part in micro_batches_}) > 1
        trainer.run()
    after = compat.compile_counts()
    torch.compiler.reset()
    assert after.graphs_compiled == before.graphs_compiled
    assert after.cache_hits - before.cache_hits == len(graphs)


@pytest.mark.nightly
def test_every_bucket_of_lengths_has_its_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After tracing, a run whose steps have three lengths compiles nothing."""
    monkeypatch.setenv(inductor_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(inductor_cache.TORCH_CACHE_VARIABLE, "")  # restored afterwards
    monkeypatch.delenv(inductor_cache.TORCH_CACHE_VARIABLE)
    install_unoptimized_compiler(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(CpuDevice, "fork_safe", False)
    data = {"source": "tests.support.conversations:make_conversations", "seq_len": 32, "buckets": [8, 16, 32]}
    config = configs.tiny_config(
        {**configs.LLAMA, "layers": 2},
        compile={"enabled": True},
        data=data,
        train={"steps": 10, "global_batch": 2, "micro_batch": 2},
        log={"directory": str(tmp_path)},
    )
    messages: list[dict[str, Any]] = []
    torch.compiler.reset()
    collect_graphs(CollectRequest(config.model_dump(mode="json"), 0, 1, 0, 2), messages.append)
    assert not [message for message in messages if message.get("problem")]
    assert messages[-1]["state"] == "complete"
    graphs = [message["name"] for message in messages if message["state"] == "compiling"]
    assert graphs.count("train: llama.forward, forward") == graphs.count("train: llama.forward, backward") == 3

    torch.compiler.reset()
    before = compat.compile_counts()
    trainer = Trainer(config)
    assert len(trainer.loader.count_steps(0, 10)) == 3
    trainer.run()
    after = compat.compile_counts()
    torch.compiler.reset()
    assert after.graphs_compiled == before.graphs_compiled


def test_fake_tensors_keep_python_numbers() -> None:
    """dynamo's guards compare floats through tensors: with another value, every block with a float would have its own
    graph."""
    with fake_tensor_mode():
        assert torch.tensor(0.1, dtype=torch.float64).item() == 0.1
        assert torch.tensor(3).item() == 3
        assert torch.zeros(()).item() == 1.0, "unknown values are 1"


def test_add_matmul_on_fake_tensors() -> None:
    with fake_tensor_mode():
        total = torch.zeros(4, 6, device="cuda")
        compat.add_matmul_(
            total, torch.zeros(4, 8, device="cuda", dtype=torch.bfloat16), torch.zeros(8, 6, device="cuda").bfloat16()
        )
        assert total.shape == (4, 6)
