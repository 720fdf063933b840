"""With batch-invariant kernels, a sequence has the same bits whatever else is in the batch, and the sampler's
log-probabilities are those of a training step. On a GPU if there is one, otherwise on the CPU."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.configs import tiny_config
from tests.support.pairwise import each_value
from trainyard import Trainer, devices
from trainyard.core.constants import IGNORE_INDEX
from trainyard.families.builtin.gemma2 import Gemma2Config
from trainyard.families.builtin.gpt import GptConfig
from trainyard.families.builtin.llama import LlamaConfig
from trainyard.families.builtin.mistral import MistralConfig
from trainyard.families.builtin.qwen3 import Qwen3Config
from trainyard.inference import scheduler as scheduler_module
from trainyard.inference.build_engine import EngineShape, build_engine
from trainyard.inference.requests import Request, SamplingOptions
from trainyard.inference.scheduler import RequestScheduler
from trainyard.kernels.reference import Kernels
from trainyard.models import ModelConfig, assign_parameters, blueprint_of, build_model
from trainyard.models.init import initial_values
from trainyard.parallel.process_group import Group
from trainyard.train.cross_entropy import make_head_loss

DEVICE = devices.select("auto")
HANDLE = DEVICE.torch_device
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES: dict[str, Any] = {"vocab": 301, "hidden": 96, "layers": 2, "max_positions": 256, "init_std": 0.2}
# Rows of 203 numbers do not fill vector registers; a window is shorter than the sequences.
MODELS: dict[str, ModelConfig] = {
    "llama": LlamaConfig(family="llama", **SIZES, heads=12, kv_heads=4, ffn=172),
    "qwen3": Qwen3Config(family="qwen3", **SIZES, heads=6, kv_heads=2, head_dim=20, ffn=200, fuse_qkv=False),
    "mistral": MistralConfig(family="mistral", **SIZES, heads=6, kv_heads=3, ffn=100, sliding_window=40),
    "gemma2": Gemma2Config(
        family="gemma2",
        **SIZES,
        heads=6,
        kv_heads=3,
        head_dim=20,
        ffn=101,
        sliding_window=40,
        attention_soft_cap=2.0,
        logit_soft_cap=3.0,
    ),
    "gpt": GptConfig(family="gpt", **SIZES, heads=4, ffn=203, activation="gelu_tanh"),
}
LENGTHS = (70, 3, 131, 64, 1, 90, 17, 65)
NEW_TOKENS = 8
Sampled = list[tuple[list[int], list[float]]]
"""The tokens of each sequence, and the log-probabilities of those after its prompt."""


def values(config: ModelConfig, dtype: torch.dtype) -> Any:
    initial = initial_values(blueprint_of(config), 0)
    return lambda name: initial(name).to(HANDLE, dtype)


@cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 301, (length,), generator=generator).tolist() for length in LENGTHS]


def sample(config: ModelConfig, dtype: torch.dtype, slots: int, order: list[int], invariant: bool = True) -> Sampled:
    """Continue the prompts in this order, in as many slots."""
    shape = EngineShape(slots, 200, dtype)
    engine = build_engine(config, DEVICE, Group(), shape, values(config, dtype), batch_invariant=invariant)
    scheduler = RequestScheduler(engine, config.vocab)
    for index in order:
        # A sampled sequence is another one after a single bit that differs.
        options = SamplingOptions(temperature=1.0, seed=index, max_new_tokens=NEW_TOKENS, num_logprobs=0)
        scheduler.add(Request(index, prompts()[index], options))
    tokens, logprobs = {i: list(prompts()[i]) for i in order}, {i: list[float]() for i in order}
    while scheduler.has_work:
        for event in scheduler.step():
            tokens[event.request_id].append(event.token)
            assert event.logprob is not None
            logprobs[event.request_id].append(event.logprob)
    return [(tokens[i], logprobs[i]) for i in sorted(order)]


def step_logprobs(config: ModelConfig, dtype: torch.dtype, sampled: Sampled, rows: list[int]) -> list[list[float]]:
    """The log-probabilities of the new tokens in a training batch of these sequences."""
    batch, labels = training_batch([sampled[row][0] for row in rows])
    model, losses = losses_of(config, dtype, DEVICE.batch_invariant_kernels(), batch, labels)
    del model
    return [(-losses[i, len(prompts()[row]) - 1 : len(sampled[row][0]) - 1]).tolist() for i, row in enumerate(rows)]


def training_batch(sequences: list[list[int]]) -> tuple[dict[str, Tensor], Tensor]:
    tokens, labels = (
        torch.zeros(len(sequences), 160, dtype=torch.int32),
        torch.full((len(sequences), 160), IGNORE_INDEX),
    )
    for i, sequence in enumerate(sequences):
        tokens[i, : len(sequence)] = torch.tensor(sequence)
        labels[i, : len(sequence) - 1] = torch.tensor(sequence[1:])
    sample_ids, key = torch.arange(len(sequences), dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    batch = {"tokens": tokens, "sample_ids": sample_ids, "rng_key": key}
    return {name: tensor.to(HANDLE) for name, tensor in batch.items()}, labels.to(HANDLE)


def losses_of(
    config: ModelConfig, dtype: torch.dtype, kernels: Kernels, batch: dict[str, Tensor], labels: Tensor
) -> tuple[Any, Tensor]:
    """A model, and its loss of each token."""
    model = build_model(config, HANDLE, kernels=kernels)
    assign_parameters(model, values(config, dtype))
    head_loss = make_head_loss(kernels, None, None, 1 << 16)  # several chunks
    return model, head_loss(model(batch), labels, per_token=True)  # type: ignore[call-arg]


@each_value(model=MODELS, dtype=DTYPES)
def test_bits_depend_on_no_neighbour(model: ModelConfig, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sample(model, dtype, 1, [*range(8)])
    for slots, order in ((3, [*range(8)]), (8, [5, 2, 0, 7, 1, 6, 3, 4])):
        assert sample(model, dtype, slots, order) == expected
    monkeypatch.setattr(scheduler_module, "PREFILL_CHUNK", 32)
    assert sample(model, dtype, 4, [*range(8)]) == expected
    for rows in ([*range(8)], [2], [6, 0, 4]):
        assert step_logprobs(model, dtype, expected, rows) == [expected[row][1] for row in rows]


def test_other_kernels_differ() -> None:
    """So that the test above can fail."""
    alone = sample(MODELS["llama"], torch.float32, 1, [*range(8)], invariant=False)
    assert sample(MODELS["llama"], torch.float32, 8, [*range(8)], invariant=False) != alone


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_other_kernels(name: str) -> None:
    config, found = MODELS[name], []
    batch, labels = training_batch([prompt * 2 for prompt in prompts()[:4] if len(prompt) < 80])
    if name != "mistral":  # two documents per sample
        batch["document_ids"] = (torch.arange(160, device=HANDLE) > 50).int().expand(len(labels), -1)
    for kernels in (DEVICE.batch_invariant_kernels(), DEVICE.kernels(fused=False)):
        model, losses = losses_of(config, torch.float32, kernels, batch, labels)
        (losses * torch.linspace(0, 1, 160, device=HANDLE)).sum().backward()
        found.append({"losses": losses.detach(), **{name: p.grad for name, p in model.named_parameters()}})
    for key, gradient in found[0].items():
        expected = found[1][key]
        assert (gradient - expected).norm() <= 1e-5 * expected.norm(), key


def test_a_run_has_the_losses_of_one_without() -> None:
    losses = []
    for invariant in (True, False):
        section = {"name": "auto", "batch_invariant": invariant}
        trainer = Trainer(tiny_config(device=section, recompute={"kind": "selective", "modules": ["mlp", "norm"]}))
        assert trainer.context.kernels.is_batch_invariant == invariant
        batches = [trainer.loader.batch(step, trainer.batch_slice) for step in range(4)]
        losses.append([float(trainer.train_step(batch, i + 1, 1e-2).loss) for i, batch in enumerate(batches)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][3] != losses[0][0]


def test_documents_are_as_if_alone() -> None:
    """A document that begins in the middle of a sample has the bits of one that begins it."""
    config, kernels = MODELS["llama"], DEVICE.batch_invariant_kernels()
    first, second = prompts()[0], prompts()[5][:80]
    batch, labels = training_batch([second])
    _, alone = losses_of(config, torch.float32, kernels, batch, labels)
    batch, labels = training_batch([first + second])
    position = torch.arange(160, device=HANDLE)
    batch["document_ids"] = (position >= len(first)).int()[None]
    batch["position_ids"] = torch.where(position < len(first), position, position - len(first)).int()[None]
    _, packed = losses_of(config, torch.float32, kernels, batch, labels)
    assert torch.equal(packed[0, len(first) : len(first) + 79], alone[0, :79])
