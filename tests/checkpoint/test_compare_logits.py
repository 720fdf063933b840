"""Two checkpoints of one model differ by exactly nothing; one changed weight shows; no more than a block is held."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import configs
from trainyard import models
from trainyard.checkpoint.compare_logits import compare_logits
from trainyard.checkpoint.formats.tensor_map import tp_rank_values, unfused_tensors
from trainyard.core.tensor_slice import TensorSlice
from trainyard.models.blueprint import layer_index

MODELS: dict[str, dict[str, Any]] = {
    "llama": configs.LLAMA,
    "llama tied": {**configs.LLAMA, "tie_embeddings": True},
    "llama unfused": {**configs.LLAMA, "fuse_qkv": False, "fuse_gate_up": False},
    "gpt": configs.GPT,
    "gpt untied": {**configs.GPT, "tie_embeddings": False},
    "bert": configs.BERT,
}


class Held:
    """Weights in memory; `change` is done to what is read of a part."""

    def __init__(
        self, name: str, change: Callable[[str, Tensor], Tensor] = lambda part, value: value, **options: Any
    ) -> None:
        self.model = configs.tiny_config({**MODELS[name], **options}).model
        self.change = change
        generator = torch.Generator().manual_seed(3)
        self.parts = {
            name: torch.randn(tensor.sizes, generator=generator) / 4
            for name, tensor in unfused_tensors(self.model).items()
        }

    def dtype(self, part: str) -> torch.dtype:
        return self.parts[part].dtype

    def read(self, wanted: TensorSlice) -> Tensor:
        return self.change(wanted.name, self.parts[wanted.name])[wanted.to_index()]


def changed(part: str, at: tuple[int | slice, ...], by: float = 0.25) -> Callable[[str, Tensor], Tensor]:
    def change(name: str, value: Tensor) -> Tensor:
        if name != part:
            return value
        value = value.clone()
        value[at] += by
        return value

    return change


@pytest.mark.parametrize("name", MODELS)
def test_the_same_weights_differ_by_nothing(name: str) -> None:
    found = compare_logits(Held(name), Held(name))
    assert found.max_difference == 0
    assert found.max_logit > 0


@pytest.mark.parametrize("name", MODELS)
def test_any_changed_weight_shows(name: str) -> None:
    """But for biases of keys, which move all scores of a query alike and so no probability."""
    first = Held(name, layers=1)
    for part, value in first.parts.items():
        at: tuple[int | slice, ...] = (-1,) * value.dim()
        if part == "embedding.weight":
            at = (slice(None), -1)  # a single word may be none of the tokens
        if not part.endswith("attention.k.bias"):
            assert compare_logits(first, Held(name, changed(part, at), layers=1)).max_difference > 0, part


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_what_is_no_number_differs_from_a_number(name: str, broken: float) -> None:
    part = "layers.1.mlp.down.weight"
    good, bad = Held(name), Held(name, changed(part, (0, 0), broken))
    for pair in ((good, bad), (bad, good)):
        assert compare_logits(*pair).max_difference == float("inf")


def test_two_models_that_overflow_alike_do_not_differ() -> None:
    part = "layers.1.mlp.down.weight"
    one, two = (Held("llama", changed(part, (0, 0), float("nan"))) for _ in range(2))
    assert compare_logits(one, two).max_difference == 0


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_the_whole_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a model that is filled at once, on the batch that the comparison made."""
    batches: list[models.Batch] = []
    forward = models.TransformerStage.forward

    def listening(self: models.TransformerStage, batch: models.Batch, *rest: Any) -> Any:
        batches.append(batch)
        return forward(self, batch, *rest)

    monkeypatch.setattr(models.TransformerStage, "forward", listening)
    zero, some = Held(name, lambda part, value: torch.zeros_like(value)), Held(name)
    found = compare_logits(zero, some)
    whole = models.fill_parameters(models.build_model(some.model), tp_rank_values(some)).eval()
    with torch.no_grad():
        output = whole(batches[0])
        largest = float(output.logits().abs().max())
        if name == "bert":
            largest = max(largest, float(output.next_sentence.abs().max()))
    tokens = batches[0]["tokens"]
    assert tokens.shape == (1, 64)
    assert len(tokens.unique()) > 32
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < some.model.vocab
    assert found.max_logit == 0  # all logits of the model of zeros
    assert found.max_difference == pytest.approx(largest, abs=1e-6)


class Counted(Held):
    """Weights each of whose reads is an array of its own, so that one can tell which are still held. Unfused: what is
    fused is a copy of what was read."""

    def __init__(self, name: str) -> None:
        super().__init__(name, fuse_qkv=False, **({"fuse_gate_up": False} if "llama" in name else {}))
        self.live: dict[int, str] = {}

    def read(self, wanted: TensorSlice) -> Tensor:
        array = super().read(wanted).clone().numpy()
        self.live[id(array)] = wanted.name
        weakref.finalize(array, self.live.pop, id(array))
        assert {layer_index(held) for held in self.live.values()} == {layer_index(wanted.name)}, (
            "what came before is still held"
        )
        return torch.from_numpy(array)


@pytest.mark.parametrize("name", MODELS)
def test_one_block_is_held_at_a_time(name: str) -> None:
    weights = Counted(name)
    compare_logits(weights, weights)
    assert not weights.live


@pytest.mark.parametrize("name", ["llama", "gpt untied"])
def test_the_words_are_not_held_with_the_head(name: str) -> None:
    weights = Counted(name)
    together: set[frozenset[str]] = set()
    read = weights.read

    def listening(wanted: TensorSlice) -> Tensor:
        value = read(wanted)
        together.add(frozenset(weights.live.values()) & {"embedding.weight", "output.weight"})
        return value

    weights.read = listening  # type: ignore[method-assign]
    compare_logits(weights, weights)
    assert together == {frozenset(), frozenset({"embedding.weight"}), frozenset({"output.weight"})}
