"""Where the weights are that a run does not train: its checkpoints do not hold them, but name the place."""

from functools import partial
from pathlib import Path

from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.checkpoint.weights import BaseWeights, frozen_tensors
from trainyard.core.errors import UserError
from trainyard.devices import Device
from trainyard.families import ModelConfig
from trainyard.parallel.mesh import Mesh
from trainyard.remote.local_copies import is_remote_model, pin_revision
from trainyard.remote.location import is_url


def find_base(
    model: ModelConfig, weights_from: str | None, seed: int, resumed: Checkpoint | None, mesh: Mesh, device: Device
) -> BaseWeights:
    """Where a run starts from or, for weights that it does not train, where the run started from whose checkpoint
    `resumed` it continues. A configuration that names another place than that of the checkpoint has moved them. All
    ranks call this."""
    if not frozen_tensors(model):
        return BaseWeights(weights_from, seed)
    if resumed and not resumed.unstored:  # it was not written by a run
        return BaseWeights(str(resumed.storage), seed)
    if resumed and weights_from in (None, resumed.config.checkpoint.weights_from):
        if not resumed.base:
            raise UserError(f"{resumed.storage}: holds trained weights only; pass Trainer the other weights again")
        return resumed.base
    seed = resumed.base.seed if resumed and resumed.base else seed
    if weights_from and is_remote_model(weights_from):
        weights_from = mesh.broadcast_object(partial(pin_revision, weights_from), device)
    elif weights_from and not is_url(weights_from):
        weights_from = str(Path(weights_from).expanduser().absolute())
    return BaseWeights(weights_from, seed)
