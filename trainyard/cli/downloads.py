"""Progress bars for what commands download before they start."""

from collections.abc import Sequence

from trainyard.cli.console import ProgressDisplay
from trainyard.core.world import World
from trainyard.remote.local_copies import is_remote_model, local_inputs, local_weights
from trainyard.remote.location import is_url


def prefetch_weights(source: str, world: World) -> None:
    """Download a model that is on the Hub or the web. The first rank of each host shows it."""
    if not is_remote_model(source):
        return
    if world.local_rank:
        local_weights(source)
        return
    with ProgressDisplay("download") as progress:
        local_weights(source, progress.update)


def fetch_inputs(inputs: Sequence[str]) -> list[str]:
    """Local paths of data inputs; those at URLs are downloaded into the caches."""
    if not any(map(is_url, inputs)):
        return list(inputs)
    with ProgressDisplay("download") as progress:
        return local_inputs(inputs, progress.update)
