"""Evaluations that ranks of the pool run."""

from types import SimpleNamespace
from typing import Any

import torch

from trainyard.core.world import World
from trainyard.evaluate.eval_config import evaluation_config
from trainyard.evaluate.evaluator import CheckpointSource, Evaluator, evaluate_data
from trainyard.evaluate.score_continuations import score_continuations
from trainyard.formats.registry import open_weights
from trainyard.train.evaluate import sum_over_ranks


def run(checkpoint: str, data: list[str], overrides: list[str]) -> list[dict[str, Any]]:
    """The results of each data set on this rank."""
    world, opened = World.from_environment(), open_weights(checkpoint)
    config = evaluation_config(opened.weights, ["device.name=cpu", *overrides], world.size)
    return evaluate_data(CheckpointSource(checkpoint, opened, config, world), data)


def score(checkpoint: str, pairs: list[tuple[list[int], list[int]]], overrides: list[str]) -> list[tuple[float, bool]]:
    """Scores of continuations on this rank."""
    world, weights = World.from_environment(), open_weights(checkpoint).weights
    config = evaluation_config(weights, ["device.name=cpu", *overrides], world.size)
    evaluator = Evaluator(config, weights, world)
    scores = score_continuations(evaluator.models[0], pairs, 64, 2, evaluator.device.torch_device)
    return [tuple(each) for each in scores]


def sum_values(checkpoint: str, values: list[float], overrides: list[str]) -> list[float]:
    """The sums over ranks of `values`, to each of which a rank adds its data-parallel index."""
    world, weights = World.from_environment(), open_weights(checkpoint).weights
    evaluator = Evaluator(evaluation_config(weights, ["device.name=cpu", *overrides], world.size), weights, world)
    runner: Any = SimpleNamespace(mesh=evaluator.mesh, device=evaluator.device)
    totals = torch.tensor([values], dtype=torch.float64) + evaluator.mesh.coords["dp"]
    return sum_over_ranks(totals, runner)[0].tolist()
