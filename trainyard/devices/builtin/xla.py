"""Trainium1 through torch_xla."""

from dataclasses import replace

from trainyard.devices.builtin.neuron import DEVICE as NEURON

DEVICE = replace(
    NEURON,
    module="trainyard.devices.neuron.xla_device:XlaDevice",
    aliases=("trn1", "trainium1"),
    always_compiles=True,
)
