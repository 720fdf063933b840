"""The ranks that a command starts: the same command line again, in several processes.

The words of the ranks are made from the parsed command line, so an option that a command gains reaches its ranks.
"""

from collections.abc import Mapping
from typing import Any

from typer import Context

from trainyard import devices
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.world import ONE_RANK, World
from trainyard.launch.launcher import launch

LAUNCH_OPTIONS = ("nproc", "logs", "hang_timeout")
"""Parameters that the launcher obeys; a rank that had them would start ranks itself."""


def launch_ranks(
    context: Context,
    ranks: int,
    device: str,
    hosts: World = ONE_RANK,
    changes: Mapping[str, Any] = {},
    **settings: Any,
) -> int:
    """Run the command of `context` as `ranks` processes of this host, with the values in `changes` for some of its
    parameters. Returns the exit code. `settings` are further arguments of `launch`."""
    environment = devices.select(device).rank_environment()
    return launch(command_words(context, changes), ranks, environment, hosts=hosts, **settings)


def command_words(context: Context, changes: Mapping[str, Any]) -> list[str]:
    """A parsed command line as words, without launch options and without options that have their default value."""
    arguments, options = [str(context.info_name)], list[str]()
    parameters: list[Any] = context.command.params
    for parameter in parameters:
        value = {**context.params, **changes}[parameter.name]
        values = value if isinstance(value, list | tuple) else [value]
        if value is None or parameter.name in LAUNCH_OPTIONS:
            continue
        if parameter.param_type_name == "argument":
            arguments += map(str, values)
        elif parameter.is_flag:
            options += [] if value == parameter.default else (parameter.opts if value else parameter.secondary_opts)[:1]
        elif value != parameter.default:
            options += [word for item in values for word in (parameter.opts[0], str(item))]
    return [*arguments, *options]


def check_nproc(nproc: int, world: World) -> None:
    """Raise UserError if another launcher has started the ranks of this host already."""
    if nproc > 1 and world.local_size > 1:
        raise UserError(
            f"--nproc {nproc}: this process is one of {world.local_size} ranks on this host already; start one process "
            f"per host (srun --ntasks-per-node 1), or one per rank without --nproc (srun --ntasks-per-node {nproc})"
        )


def starts_tensor_parallel(tp: int, world: World) -> bool:
    """True if this process must start the `tp` ranks of `--tp`, False if it is one of them."""
    if tp > 1 and world.size == 1:
        return True
    if world.size != tp:
        raise UserError(f"--tp {tp}: this run has {counted(world.size, 'rank')}")
    return False


def launch_tensor_parallel(context: Context, source: str, tp: int, device: str, world: World) -> int:
    """Run the command of `context` as `tp` ranks that share the model of a checkpoint."""
    from trainyard.inference.load import check_tensor_parallel  # imports torch

    check_tensor_parallel(source, tp)
    return launch_ranks(context, tp, device, world)
