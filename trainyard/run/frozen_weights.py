"""The weights of step 0 beside those that train: a reference for every step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainyard.checkpoint.weights import BaseWeights, frozen_tensors
from trainyard.core.errors import UserError
from trainyard.run.setup import TrainSetup
from trainyard.train import build
from trainyard.train.optim.optimizer import Optimizer


class FrozenWeights:
    """A copy of the trained weights as they were before the first update: of adapters alone, if these are trained. A
    run that resumes reads them again from where it started."""

    def __init__(self, run: TrainSetup) -> None:
        state = run.optimizer.state
        run.optimizer.wait_for_weights()
        self.optimizer: Optimizer = run.optimizer
        self.weights = state.weights.clone()
        if not run.completed_steps:
            return
        base = run.base
        if base is None:
            raise UserError("the reference of step 0: the run started from weights that were given as an argument")
        if run.resumed and not frozen_tensors(run.config.model):  # whatever the configuration says now
            started = run.resumed.config
            base = BaseWeights(started.checkpoint.weights_from, started.train.seed)
        values = build.initial_parameters(run.config.model, base, run.context, False, None)
        for name in state.names:
            state.flat.view(self.weights, name).copy_(values(name))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with these weights."""
        self.optimizer.wait_for_copies()  # a checkpoint in progress reads the weights that make room
        weights = self.optimizer.state.weights
        current = weights.clone()
        with torch.no_grad():
            weights.copy_(self.weights)
        try:
            yield
        finally:
            with torch.no_grad():
                weights.copy_(current)
