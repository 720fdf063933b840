"""One of two processes that form a world on XLA's CPU client: python -m tests.xla.two_processes.

The client gives each process devices of its own and runs nothing across processes. With CPU_NUM_DEVICES=2 each process
sees two devices, as on a Trainium each sees the devices of all: set-up, groups and lowered graphs are real, and nothing
is executed. Prints a JSON summary.
"""

import json
import re

import torch
import torch_xla
import torch_xla.runtime as xla_runtime

from trainyard.core.world import World
from trainyard.devices.neuron.xla_device import XlaDevice
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import Mesh, shutdown_distributed
from trainyard.parallel.process_group import Group

REPLICA_GROUPS = re.compile(r" (all-reduce|all-gather|reduce-scatter)\(.*replica_groups={(.*?)}, ")


def main() -> None:
    device, world = XlaDevice(), World.from_environment()
    device.prepare(False, world)
    torch_xla._XLAC._xla_set_default_device(f"xla:{world.rank}")
    mesh = Mesh.create(Layout(tp=2), device, world)
    result = {
        "rank": xla_runtime.global_ordinal(),
        "size": xla_runtime.world_size(),
        "lowered": {name: lower(group, device) for name, group in {"tp": mesh.tp, "world": mesh.world}.items()},
        "dp": mesh.dp_cp.size,
        "gathered": mesh.all_gather_object({"rank": world.rank}),
        "broadcast": mesh.broadcast_object(lambda: f"of rank {world.rank}", device),
        "compiled": torch_xla._XLAC._xla_metrics_report().count("UncachedCompile"),
    }
    print(json.dumps(result))
    shutdown_distributed()


def lower(group: Group, device: XlaDevice) -> list[tuple[str, str]]:
    """The collectives in the graph of one sum, one gather and one scatter."""
    x = torch.ones(4, device=device.torch_device)
    results = [group.all_reduce_sum(x), group.all_gather(x), group.start_reduce_scatter(x)]
    text = torch_xla._XLAC._get_xla_tensors_hlo(results)
    return [match.groups() for match in REPLICA_GROUPS.finditer(text)]


if __name__ == "__main__":
    main()
