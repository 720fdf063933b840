"""Equal checkpoints have equal logits; one changed weight shows; only one block is in memory at a time."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import configs
from trainyard import models
from trainyard.checkpoint.weights import local_values, unfused_tensors
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.blueprint import layer_index
from trainyard.formats.compare import compare_logits

MODELS: dict[str, dict[str, Any]] = {
    "llama": configs.LLAMA,
    "llama tied": {**configs.LLAMA, "tie_embeddings": True},
    "llama unfused": {**configs.LLAMA, "fuse_qkv": False, "fuse_gate_up": False},
    "gpt": configs.GPT,
    "gpt untied": {**configs.GPT, "tie_embeddings": False},
    "bert": configs.BERT,
}


class InMemoryWeights:
    """Random weights; `change` is applied to each tensor that is read."""

    def __init__(
        self, name: str, change: Callable[[str, Tensor], Tensor] = lambda name, value: value, **options: Any
    ) -> None:
        self.model = configs.tiny_config({**MODELS[name], **options}).model
        self.change = change
        generator = torch.Generator().manual_seed(3)
        self.tensors = {
            name: torch.randn(tensor.sizes, generator=generator) / 4
            for name, tensor in unfused_tensors(self.model).items()
        }

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, wanted: TensorSlice) -> Tensor:
        return self.change(wanted.name, self.tensors[wanted.name])[wanted.to_index()]


def changed(changed_name: str, index: tuple[int | slice, ...], by: float = 0.25) -> Callable[[str, Tensor], Tensor]:
    def change(name: str, value: Tensor) -> Tensor:
        if name != changed_name:
            return value
        value = value.clone()
        value[index] += by
        return value

    return change


@pytest.mark.parametrize("name", MODELS)
def test_equal_weights_have_equal_logits(name: str) -> None:
    comparison = compare_logits(InMemoryWeights(name), InMemoryWeights(name))
    assert comparison.max_difference == 0
    assert comparison.max_logit > 0


@pytest.mark.parametrize("name", MODELS)
def test_any_changed_weight_shows(name: str) -> None:
    """Except for biases of keys, which shift all scores of a query alike and change no probability."""
    weights = InMemoryWeights(name, layers=1)
    for tensor_name, value in weights.tensors.items():
        index: tuple[int | slice, ...] = (-1,) * value.dim()
        if tensor_name == "embedding.weight":
            index = (slice(None), -1)  # a single row may belong to none of the tokens
        if not tensor_name.endswith("attention.k.bias"):
            other = InMemoryWeights(name, changed(tensor_name, index), layers=1)
            assert compare_logits(weights, other).max_difference > 0, tensor_name


@pytest.mark.parametrize("nonfinite", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_nonfinite_logits_differ_from_finite_ones(name: str, nonfinite: float) -> None:
    name_changed = "layers.1.mlp.down.weight"
    good, bad = InMemoryWeights(name), InMemoryWeights(name, changed(name_changed, (0, 0), nonfinite))
    for pair in ((good, bad), (bad, good)):
        assert compare_logits(*pair).max_difference == float("inf")


def test_nan_is_a_difference_even_from_itself() -> None:
    """Logits that are NaN in both models say nothing about their weights, so that equal NaNs must not pass."""
    name_changed = "layers.1.mlp.down.weight"
    a, b = (InMemoryWeights("llama", changed(name_changed, (0, 0), float("nan"))) for _ in range(2))
    comparison = compare_logits(a, b)
    assert comparison.max_difference == float("inf")
    assert math.isnan(comparison.max_logit)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_a_model_filled_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is a model with all weights loaded, on the batch of the comparison."""
    batches: list[models.Batch] = []
    forward = models.TransformerStage.forward

    def recording_forward(self: models.TransformerStage, batch: models.Batch, *rest: Any) -> Any:
        batches.append(batch)
        return forward(self, batch, *rest)

    monkeypatch.setattr(models.TransformerStage, "forward", recording_forward)
    zeros, weights = InMemoryWeights(name, lambda name, value: torch.zeros_like(value)), InMemoryWeights(name)
    comparison = compare_logits(zeros, weights)
    model = models.fill_parameters(models.build_model(weights.model), local_values(weights)).eval()
    with torch.no_grad():
        output = model(batches[0])
        largest = float(output.logits().abs().max())
        if name == "bert":
            largest = max(largest, float(output.next_sentence.abs().max()))
    tokens = batches[0]["tokens"]
    assert tokens.shape == (1, 64)
    assert len(tokens.unique()) > 32
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < weights.model.vocab
    assert comparison.max_logit == 0  # the model of zeros
    assert comparison.max_difference == pytest.approx(largest, abs=1e-6)


class TrackedWeights(InMemoryWeights):
    """Weights that track which of their reads are still in memory. Nothing is fused: fusing copies what was read."""

    def __init__(self, name: str) -> None:
        super().__init__(name, fuse_qkv=False, **({"fuse_gate_up": False} if "llama" in name else {}))
        self.live: dict[int, str] = {}

    def read(self, wanted: TensorSlice) -> Tensor:
        array = super().read(wanted).clone().numpy()
        self.live[id(array)] = wanted.name
        weakref.finalize(array, self.live.pop, id(array))
        assert {layer_index(live) for live in self.live.values()} == {layer_index(wanted.name)}, (
            "the previous block is still in memory"
        )
        return torch.from_numpy(array)


@pytest.mark.parametrize("name", MODELS)
def test_one_block_is_in_memory_at_a_time(name: str) -> None:
    weights = TrackedWeights(name)
    compare_logits(weights, weights)
    assert not weights.live


@pytest.mark.parametrize("name", ["llama", "gpt untied"])
def test_the_embedding_is_not_in_memory_with_the_output_projection(name: str) -> None:
    weights = TrackedWeights(name)
    together: set[frozenset[str]] = set()
    read = weights.read

    def recording_read(wanted: TensorSlice) -> Tensor:
        value = read(wanted)
        together.add(frozenset(weights.live.values()) & {"embedding.weight", "output.weight"})
        return value

    weights.read = recording_read  # type: ignore[method-assign]
    compare_logits(weights, weights)
    assert together == {frozenset(), frozenset({"embedding.weight"}), frozenset({"output.weight"})}
