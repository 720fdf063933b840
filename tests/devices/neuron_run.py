"""Train a tiny model on the fake torch_neuronx and print a JSON summary: python -m tests.devices.neuron_run.

Arguments: layout (JSON), precision.kind, log directory. The parent puts the fake package on PYTHONPATH.
"""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch_neuronx

from tests.support import configs
from trainyard.devices.cpu import CpuDevice
from trainyard.devices.neuron.device import NeuronDevice
from trainyard.devices.neuron.topology import TrainiumInstance
from trainyard.parallel.mesh import shutdown_distributed
from trainyard.run.callbacks import Callback, TrainerView
from trainyard.run.trainer import Trainer


class FakeNeuronDevice(NeuronDevice):
    """The neuron device with its tensors on the CPU."""

    torch_device = torch.device("cpu")

    def prepare(self, *args: Any) -> None:
        CpuDevice().prepare(*args)
        super().prepare(*args)


class RecordLog(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.memory_bytes = 0

    def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        self.losses.append(record["loss"])
        self.memory_bytes = record["memory_bytes"]


def main(layout: dict[str, Any], precision: str, directory: str) -> None:
    torch.set_num_threads(1)
    model = {**configs.LLAMA, "layers": 4}
    common = {
        "precision": {"kind": precision},
        "log": {"every": 1, "loggers": [], "directory": directory},
    }
    config = configs.tiny_config(
        model, layout=layout, compile={"enabled": True}, checkpoint={"export_hf": False, "every": 2}, **common
    )
    device, log, cpu_log = FakeNeuronDevice(TrainiumInstance("trn2", 16, "trn2.48xlarge")), RecordLog(), RecordLog()
    trainer = Trainer(config, callbacks=[log], device=device)
    summary = trainer.run()
    if trainer.layout.world_size == 1:
        Trainer(configs.tiny_config(model, **common), callbacks=[cpu_log]).run()
    result = {
        "losses": log.losses,
        "cpu_losses": cpu_log.losses,
        "memory": log.memory_bytes,
        "attention_calls": [graph.code.count("scaled_dot_product_attention(") for graph in torch_neuronx.graphs],
        "code": [graph.code for graph in torch_neuronx.graphs],
        "option_objects": len({id(options) for options in torch_neuronx.options_seen}),
        "group": dist.get_backend() if dist.is_initialized() else None,
        "object_group": dist.get_backend(trainer.mesh.object_group) if trainer.mesh.object_group else None,
        "core": os.environ["NEURON_RT_VISIBLE_CORES"],
        "cache": os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"],
        "device": str(torch.device("neuron")),
        "stream_waits": len(torch_neuronx.current_stream().waited),
        "checkpoint": summary.last_checkpoint,
    }
    print(json.dumps(result), flush=True)
    shutdown_distributed()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *sys.argv[2:])
