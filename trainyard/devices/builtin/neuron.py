"""Trainium2 and 3 through TorchNeuron, AWS's native backend. Memory is not measured."""

from trainyard.devices.kind import DeviceKind, Efficiency

DEVICE = DeviceKind(
    module="trainyard.devices.neuron.device:NeuronDevice",
    max_logits_bytes=1 << 28,
    label="Trainium",
    aliases=("trainium", "trn2", "trn3", "trainium2"),
    has_grouped_gemm=False,
    decomposes_attention=True,
    fused_attention=False,
    sends_by_all_gather=True,
    # The rounded fit of bench/calibrate.py to runs on trn1. No training speed is published for trn2 and trn3.
    efficiency=Efficiency(0.74, 0.74, 0.26, 0.44, 0.26),
)
