"""Compiled blocks: one graph serves all layers, whatever is recomputed."""

from typing import Any

import pytest
import torch

from tests.support import configs
from trainyard.config.schema import RecomputeSection
from trainyard.devices.base import CompileOptions
from trainyard.parallel.recompute import apply_recompute
from trainyard.train.compile.compile_blocks import compile_model


@pytest.mark.parametrize("kind", ["attention", "full"])
def test_one_graph_serves_more_layers_than_torch_recompiles(kind: str) -> None:
    """Guards against a graph for each recomputed layer: after eight torch gives up, and deeper models failed."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    section = configs.tiny_config({**configs.LLAMA, "layers": 10}).model
    plain, model = configs.tiny_model(section), configs.tiny_model(section)
    batch = configs.tiny_batch("llama")
    assert apply_recompute(list(model.layers.children()), RecomputeSection(kind=kind)) == 10
    assert set(dict(model.named_parameters())) == set(dict(plain.named_parameters()))
    torch.compiler.reset()
    compile_model(model, CompileOptions(backend), "default", padding_free=False, compile_embedding=False)
    results = []
    for each in (plain, model):
        hidden = each(batch).hidden
        hidden.square().sum().backward()
        results.append([hidden, *(parameter.grad for parameter in each.parameters() if parameter.grad is not None)])
    torch.compiler.reset()
    assert len(graphs) == 1
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)
