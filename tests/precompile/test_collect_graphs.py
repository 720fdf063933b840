"""Collecting for a device with kernels of its own and compilers that do not survive a fork. A CPU stands in for it: its
kernels are the GPU's, by Triton's interpreter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import _dynamo

from tests.support import configs
from trainyard import compat
from trainyard.compile import inductor_cache
from trainyard.devices.cpu import CpuDevice
from trainyard.dryrun.meta_ops import fake_tensor_mode
from trainyard.kernels.triton.ops import TritonKernels
from trainyard.precompile.collect_graphs import CollectRequest, collect_graphs
from trainyard.train import micro_batches
from trainyard.train.trainer import Trainer

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU"),
]


def test_one_graph_serves_all_lengths_and_is_there_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BERT's micro batches leave their padding behind, so that they have many lengths."""
    monkeypatch.setenv(inductor_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(inductor_cache.TORCH_CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(CpuDevice, "kernels", lambda self, own: TritonKernels())
    monkeypatch.setattr(CpuDevice, "forks", False)
    monkeypatch.setattr(CpuDevice, "synchronous", False)
    monkeypatch.setattr(micro_batches, "ROUND", 2)
    config = configs.tiny_config(
        {**configs.BERT, "layers": 3, "heads": 2},
        compile={"enabled": True},
        precision={"kind": "bf16"},
        data={"validation_fraction": 0.1},
        evaluate={"every": 1, "batches": 1},
        train={"steps": 1, "global_batch": 4, "micro_batch": 2},
        log={"directory": str(tmp_path)},
    )
    told: list[dict[str, Any]] = []
    torch.compiler.reset()
    with _dynamo.config.patch(automatic_dynamic_shapes=True), monkeypatch.context() as patched:  # as before, afterwards
        # As torch 2.11 does on a GPU: one graph is asked for again by each block.
        patched.setattr(torch._TorchCompileInductorWrapper, "__eq__", lambda one, other: one is other)
        collect_graphs(CollectRequest(config.model_dump(mode="json"), 0, 1, 0, 2), told.append)
    assert not [message for message in told if message.get("problem")]
    assert told[-1]["state"] == "sealed"
    graphs = [message["name"] for message in told if message["state"] == "compiling"]
    assert graphs.count("evaluate: bert.forward, forward") == 1

    torch.compiler.reset()
    before = compat.compile_counts()
    with _dynamo.config.patch(automatic_dynamic_shapes=True):
        trainer = Trainer(config)
        parts = trainer.runner.stage_batch(trainer.loader.batch(0)).batches
        assert len({part["tokens"].shape[1] for part in parts}) > 1
        trainer.run()
    after = compat.compile_counts()
    torch.compiler.reset()
    assert after.graphs_compiled == before.graphs_compiled
    assert after.cache_hits - before.cache_hits == len(graphs)


def test_numbers_that_are_known_stay_so_without_memory() -> None:
    """torch asks whether a graph fits by way of a tensor of the number: were it another one, every block with a float
    would have a graph of its own."""
    with fake_tensor_mode():
        assert torch.tensor(0.1, dtype=torch.float64).item() == 0.1
        assert torch.tensor(3).item() == 3
        assert torch.zeros(()).item() == 1.0, "not known"


def test_a_product_added_to_a_sum_has_a_shape() -> None:
    with fake_tensor_mode():
        total = torch.zeros(4, 6, device="cuda")
        compat.add_matmul_(
            total, torch.zeros(4, 8, device="cuda", dtype=torch.bfloat16), torch.zeros(8, 6, device="cuda").bfloat16()
        )
        assert total.shape == (4, 6)
