"""Micro batches without padding, complete steps with fused kernels, and CUDA graph replay."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import configs
from tests.support.examples import examples
from trainyard import Trainer, devices
from trainyard.config.schema import Config
from trainyard.devices.cpu import CpuDevice
from trainyard.kernels.reference import Kernels
from trainyard.kernels.triton.ops import TritonKernels
from trainyard.models import Batch
from trainyard.train.micro_batches import split
from trainyard.train.micro_batches.cuda_graphs import MAX_GRAPHS, CudaGraphRunner
from trainyard.train.micro_batches.split import PACKED_LENGTH_MULTIPLE, padding_free_micro_batches

DEVICE = devices.select("auto")
"""Without a GPU, kernels run on the CPU in Triton's interpreter."""


def make_batch(lengths: list[int], seq_len: int, predictions: int) -> Batch:
    count = len(lengths)
    mask = (torch.arange(seq_len) < torch.tensor(lengths)[:, None]).int()
    number = torch.arange(count * seq_len, dtype=torch.int32).view(count, seq_len) + 1
    return {
        "tokens": number * mask,
        "segment_ids": mask * (number % 2),
        "attention_mask": mask,
        "masked_positions": torch.stack(
            [torch.randint(0, length, (predictions,), dtype=torch.int32) for length in lengths]
        ),
        "labels": torch.randint(0, 9, (count, predictions), dtype=torch.int32),
        "next_sentence_labels": torch.randint(0, 2, (count,), dtype=torch.int32),
        "sample_ids": torch.arange(100, 100 + count, dtype=torch.int32),
    }


@examples(50)
@given(st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, 12), min_size=8, max_size=8))))
def test_removing_padding_keeps_every_token(case: tuple[int, list[int]]) -> None:
    micro, lengths = {1: 1, 2: 2, 3: 4, 4: 8}[case[0]], case[1]
    batch = make_batch(lengths, 12, 3)
    parts = padding_free_micro_batches(batch, micro)
    assert len(parts) == len(lengths) // micro
    samples: list[int] = []
    for part in parts:
        starts = part["cu_seqlens"].tolist()
        assert len(starts) == micro + 1
        assert part["tokens"].shape[1] % PACKED_LENGTH_MULTIPLE == 0
        assert part["tokens"].shape[1] - starts[-1] < PACKED_LENGTH_MULTIPLE
        assert not part["tokens"][0, starts[-1] :].any()
        for s, (begin, end) in enumerate(pairwise(starts)):
            sample = int(part["sample_ids"][0, begin])
            row = sample - 100
            samples.append(row)
            assert end - begin == lengths[row]
            assert torch.equal(part["tokens"][0, begin:end], batch["tokens"][row, : end - begin])
            assert torch.equal(part["segment_ids"][0, begin:end], batch["segment_ids"][row, : end - begin])
            assert part["position_ids"][0, begin:end].tolist() == list(range(end - begin))
            assert set(part["sample_ids"][0, begin:end].tolist()) == {sample}
            positions = part["masked_positions"].view(micro, -1)[s].long()
            assert torch.equal(
                part["tokens"][0, positions], batch["tokens"][row, batch["masked_positions"][row].long()]
            )
            assert torch.equal(part["labels"][s], batch["labels"][row])
            assert part["next_sentence_labels"][s] == batch["next_sentence_labels"][row]
    assert sorted(samples) == list(range(len(lengths)))


def test_micro_batches_have_similar_numbers_of_tokens() -> None:
    torch.manual_seed(1)
    lengths = torch.randint(10, 100, (256,)).tolist()
    totals = [int(part["cu_seqlens"][-1]) for part in padding_free_micro_batches(make_batch(lengths, 100, 2), 32)]
    assert max(totals) - min(totals) < 100
    assert max(totals) - min(totals) < 0.03 * max(totals)


def small(model: dict[str, Any]) -> Config:
    """One layer and few tokens, because the interpreter is slow."""
    return configs.tiny_config(
        {**model, "layers": 1},
        device={"name": DEVICE.name},
        data={"seq_len": 8, "max_predictions": 2},
        train={"micro_batch": 1, "global_batch": 2},
    )


def results(config: Config, kernels: Callable[[], Kernels], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setattr(type(DEVICE), "kernels", lambda self, fused: kernels())
    monkeypatch.setattr(split, "PACKED_LENGTH_MULTIPLE", 16)
    trainer = Trainer(config)
    for model in trainer.models:
        model.train()
    out = []
    for number in range(2):
        result = trainer.train_step(trainer.loader.batch(number), number + 1, 1e-3)
        out += [float(result.loss), float(result.grad_norm)]
    for name in ("embedding.weight", "layers.0.mlp.down.weight"):
        out.append(float(trainer.full_parameter(name).double().pow(2).sum()))
    return out


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gpt", "bert"))]
)
def test_fused_kernels_equal_reference_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, fused weight gradient accumulation, and BERT without padding."""
    model = {"llama": {}, "gpt": {"attention_dropout": 0.2, "hidden_dropout": 0.1, "embedding_dropout": 0.1}}.get(
        family, {"attention_dropout": 0.2, "hidden_dropout": 0.1}
    )
    config = small({**configs.TINY_MODELS[family], **model})
    fused, plain = (results(config, kernels, monkeypatch) for kernels in (TritonKernels, Kernels))
    assert fused == pytest.approx(plain, rel=2e-5)


class FakeGraphDevice(CpuDevice):
    """Replays a graph by calling the captured function again, and counts."""

    supports_graphs = True

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def capture_graph(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def test_graph_is_captured_the_second_time_and_then_replayed() -> None:
    device, seen = FakeGraphDevice(), []
    replays = CudaGraphRunner(device)
    for value in range(4):
        replays({"tokens": torch.full((2, 3), value)}, lambda micro: seen.append(int(micro["tokens"][0, 0])))
    assert seen == [0, 1, 2, 3]
    assert (device.captured, device.replayed) == (1, 3)
    for size in range(4, 10):
        for _ in range(2):
            replays({"tokens": torch.full((2, size), size)}, lambda micro: seen.append(int(micro["tokens"][0, 0])))
    assert seen[4:] == [size for size in range(4, 10) for _ in range(2)]
    assert device.captured == MAX_GRAPHS


@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_replayed_steps_give_the_same_losses(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything that a micro batch reads besides its fields keeps its address: rng_key, divisors, sums, gradients."""
    losses = []
    for replay in (False, True):
        config = configs.tiny_config(
            configs.TINY_MODELS[family], train={"micro_batch": 2, "global_batch": 4}, compile={"cuda_graphs": replay}
        )
        monkeypatch.setattr(CpuDevice, "supports_graphs", replay)
        trainer = Trainer(config)
        for model in trainer.models:
            model.train()
        losses.append([float(trainer.train_step(trainer.loader.batch(n), n + 1, 1e-3).loss) for n in range(3)])
        assert (trainer.runner.graph_runner is not None) == replay
    assert losses[0] == losses[1]


NIGHTLY = pytest.mark.nightly
GPT_FAST = [pytest.param(name, marks=() if name == "gpt" else NIGHTLY) for name in configs.TINY_MODELS]


@pytest.mark.parametrize("family", GPT_FAST)
def test_fused_kernels_compile_without_graph_breaks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, also for micro batches without padding of any length."""
    monkeypatch.setattr(type(DEVICE), "kernels", lambda self, fused: TritonKernels())
    monkeypatch.setattr(split, "PACKED_LENGTH_MULTIPLE", 16)
    losses = []
    for compiled in (False, True):
        trainer = Trainer(small(configs.TINY_MODELS[family]))
        assert trainer.runner.padding_free == (family == "bert")
        for model in trainer.models:
            model.train()
            for block in model.layers.children() if compiled else ():
                block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
        steps = range(1 + trainer.runner.padding_free)  # a second length
        results = [trainer.train_step(trainer.loader.batch(n), n + 1, 1e-3) for n in steps]
        losses.append([float(value) for result in results for value in (result.loss, result.grad_norm)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
