"""Functions that ranks of the pool run: complete runs, compiled steps, reordered ranks."""

import os
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from trainyard import compat
from trainyard.config.schema import Config
from trainyard.core.errors import RunStopped
from trainyard.devices.base import CompileOptions
from trainyard.devices.cpu import CpuDevice
from trainyard.models import Batch, ModelOutput
from trainyard.preflight.verify import compare_records, record_training, single_rank_config
from trainyard.run import trainer as trainer_module
from trainyard.run.callbacks import Callback, TrainerView
from trainyard.run.continue_prompts import continue_prompts
from trainyard.run.trainer import Trainer


class LossRecorder(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []

    def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        self.losses.append(record["loss"])
        self.grad_norms.append(record["grad_norm"])


def user_loss_fn(output: ModelOutput, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross entropy over full logits, as a user would write it, of a third of the labels: ranks count different
    numbers."""
    labels = batch["labels"].flatten().long()
    labels = torch.where(labels % 3 == 0, labels, -100)
    logits = output.logits().flatten(0, -2).float()
    return F.cross_entropy(logits, labels, reduction="sum") + output.hidden.square().sum() * 1e-3, (labels >= 0).sum()


def accuracy(output: ModelOutput, batch: Batch) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    counts = labels >= 0
    return ((output.logits().argmax(-1) == labels) & counts).sum().float(), counts.sum()


def run(config: Config, user_loss: bool = False, backend: str = "inductor") -> dict[str, Any]:
    """Run a training. `backend` is the one of torch.compile, if the configuration compiles."""
    recorder, loss = LossRecorder(), user_loss_fn if user_loss else None
    if config.compile.enabled:
        torch.compiler.reset()  # the ranks of a pool live on, and torch limits the graphs of a function
    with (
        patch.object(CpuDevice, "compile_options", lambda self: CompileOptions(backend)),
        patch.object(CpuDevice, "peak_throughput", lambda self, dtype: None),
        patch.object(trainer_module, "quiet_garbage_collector", nullcontext),
        patch.object(os, "fsync", lambda fd: None),
    ):
        summary = Trainer(config, loss=loss, metrics={"accuracy": accuracy}, callbacks=[recorder]).run()
    return {
        "losses": recorder.losses,
        "grad_norms": recorder.grad_norms,
        "steps": summary.steps,
        "evaluation": summary.evaluation,
        "directory": str(summary.directory),
    }


def stopped_on_one_rank(config: Config, rank: int, last_step: int) -> dict[str, Any]:
    """Ask one rank to stop one step before `last_step`, the step at which all ranks must stop."""

    class RequestStop(Callback):
        def on_step(self, trainer: TrainerView, step: int) -> None:
            if torch.distributed.get_rank() == rank and step == last_step - 1:
                trainer.stop_signal.requested = True  # type: ignore[attr-defined]

    summary = Trainer(config, callbacks=[RequestStop()]).run()
    return {"steps": summary.steps, "interrupted": summary.interrupted}


def run_with_nan_gradient(config: Config, name: str) -> str:
    """Run with NaN gradients of one parameter. Returns the error message."""
    trainer = Trainer(config)
    for model in trainer.models:
        parameter = dict(model.named_parameters()).get(name)
        if parameter is not None:
            parameter.register_hook(lambda grad: grad * float("nan"))
    try:
        trainer.run()
    except RunStopped as error:
        return str(error)
    return "not stopped"


def compiled_graphs(config: Config) -> dict[str, Any]:
    """Compile each block with a backend that records its graphs."""
    codes: set[str] = set()
    collectives: list[int] = []

    def record_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        shapes = [tuple(x.shape) for x in inputs if isinstance(x, Tensor)]
        names = [str(node.target) for node in graph.graph.nodes]
        collectives.append(sum("autograd_function" in name for name in names))
        codes.add(f"{graph.code}{shapes}")
        return aot_eager(graph, inputs)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    trainer = Trainer(config)
    eager = Trainer(config)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in trainer.model.layers.children():
        block.forward = torch.compile(block.forward, backend=record_graph, fullgraph=True, dynamic=False)
    batch = trainer.loader.batch(0, trainer.batch_slice)
    return {
        "losses": [float(trainer.train_step(batch, step, 1e-3).loss) for step in (1, 2)],
        "eager": [float(eager.train_step(batch, step, 1e-3).loss) for step in (1, 2)],
        "breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "graphs": codes,
        "collectives": max(collectives),
    }


def saved_activation_shapes(config: Config) -> set[tuple[int, ...]]:
    """Shapes of the tensors that the blocks save for backward."""
    trainer = Trainer(config)
    shapes: set[tuple[int, ...]] = set()

    def pack(tensor: Tensor) -> Tensor:
        shapes.add(tuple(tensor.shape))
        return tensor

    def record_saved(block: torch.nn.Module) -> Any:
        forward = block.forward

        def run(*arguments: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return forward(*arguments)

        return run

    for block in trainer.model.layers.children():
        block.forward = record_saved(block)
    trainer.train_step(trainer.loader.batch(0, trainer.batch_slice), 1, 1e-3)
    return shapes


def compare_reordered(config: Config, order: list[int], any_order: bool = True) -> list[str]:
    """Compare a training on ranks in another order with one rank. Returns the findings that are not ok.

    Without `any_order`, groups with ranks in descending order are not available, as in torch before 2.13.
    """
    unsorted = any_order and compat.supports_unsorted_groups()
    with (
        patch.object(CpuDevice, "rank_order", lambda self, tp, world_size: order),
        patch.object(compat, "supports_unsorted_groups", lambda: unsorted),
    ):
        record = record_training(config, 2)
    if torch.distributed.get_rank():
        return []
    with patch.dict("os.environ", {"WORLD_SIZE": "1", "RANK": "0"}):
        findings = compare_records(record, record_training(single_rank_config(config), 2), "fp32")
    return [str(finding) for finding in findings if not finding.ok]


def abort_on_rank_1() -> int:
    if os.environ["RANK"] == "1":
        os.abort()
    return 0


def continued_prompts(config: Config, prompts: list[list[int]]) -> list[list[list[int]] | None]:
    """The new tokens of prompts after two steps: the most likely ones, and sampled ones. The optimizer may still be
    gathering weights, and training continues afterwards."""
    trainer = Trainer(config)
    for model in trainer.models:
        model.train()
    for step in (1, 2):
        trainer.train_step(trainer.loader.batch(step - 1, trainer.batch_slice), step, 1e-3)
    results = []
    for temperature in (0.0, 1.0):
        samples = config.samples.model_copy(update={"temperature": temperature})
        results.append(continue_prompts(trainer.runner, samples, config.data, prompts, end_id=-1))
    assert all(model.training for model in trainer.models)
    trainer.train_step(trainer.loader.batch(2, trainer.batch_slice), 3, 1e-3)
    return results


def stopped_between_tokens(config: Config, rank: int) -> dict[str, Any]:
    """Ask one rank to stop before the third token of the first text samples."""

    class RequestStop(Callback):
        tokens = 0

        def on_evaluation_batch(self, trainer: TrainerView) -> None:
            self.tokens += 1
            if torch.distributed.get_rank() == rank and self.tokens == 3:
                trainer.stop_signal.requested = True  # type: ignore[attr-defined]

    callback = RequestStop()
    summary = Trainer(config, callbacks=[callback]).run()
    return {"steps": summary.steps, "interrupted": summary.interrupted, "polls": callback.tokens}


def graphs_of_run(config: Config) -> dict[str, int]:
    """Graphs compiled until the first logged step, until the first evaluation, and until the end of the run."""
    counts: dict[str, int] = {}

    def count(event: str) -> None:
        counts.setdefault(event, torch._dynamo.utils.counters["stats"]["unique_graphs"])

    class CountGraphs(Callback):
        def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
            count("step")

        def on_evaluate(self, trainer: TrainerView, record: dict[str, Any]) -> None:
            count("evaluate")

        def on_end(self, trainer: TrainerView) -> None:
            count("end")

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with patch.object(CpuDevice, "compile_options", lambda self: CompileOptions("aot_eager")):
        Trainer(config, callbacks=[CountGraphs()]).run()
    return counts
