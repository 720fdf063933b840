"""The weights that a fresh run starts from, wherever they are.

Weights on the Hub, in S3 or on the web are downloaded once per host, at the commit that the first rank saw. A download
may take longer than a collective waits, so ranks that have the weights wait for the others at the store.
"""

import time
from functools import partial
from itertools import count

from trainyard.core.errors import UserError
from trainyard.devices import Device
from trainyard.families import ModelConfig
from trainyard.formats.registry import OpenedCheckpoint, open_weights
from trainyard.parallel.mesh import Mesh
from trainyard.remote.local_copies import is_remote_model, pin_revision
from trainyard.remote.location import is_url

POLL_S = 0.5
_calls = count()
"""Numbers the waits of a process, which are the same on all ranks."""


def open_initial_weights(source: str, model: ModelConfig, seed: int, mesh: Mesh, device: Device) -> OpenedCheckpoint:
    """Open the weights at `source`, a path, URL or name on the Hub; parameters that they lack have the initial values
    of `seed`. All ranks call this."""
    if not is_remote_model(source) and not is_url(source):
        return open_weights(source, model, seed=seed)
    source = mesh.broadcast_object(partial(pin_revision, source), device)
    key = f"trainyard/weights/{next(_calls)}"
    try:
        opened = open_weights(source, model, seed=seed)
    except UserError as error:
        if mesh.store is not None:
            mesh.store.set(f"{key}/error", str(error))
        raise
    _wait_for_all(key, mesh)
    return opened


def _wait_for_all(key: str, mesh: Mesh) -> None:
    """Wait until all ranks have called this, without a limit; raise the error of a rank that failed."""
    if mesh.store is None:  # one rank, or a caller created the process group
        return
    mesh.store.add(f"{key}/count", 1)
    while mesh.store.add(f"{key}/count", 0) < mesh.world.size:
        if mesh.store.check([f"{key}/error"]):
            raise UserError(mesh.store.get(f"{key}/error").decode())
        time.sleep(POLL_S)
