"""A Trainium without memory: the meta device with the rank order and group rules of the chip.

For audits on machines without the chip; it computes nothing, and `select` never returns it.
"""

from trainyard.devices.meta import MetaDevice
from trainyard.devices.neuron.trainium import TrainiumDevice, TrainiumTopology


class MetaTrainium(TrainiumTopology, MetaDevice):
    max_logits_bytes = TrainiumDevice.max_logits_bytes
    decomposes_attention = TrainiumDevice.decomposes_attention
    has_grouped_gemm = TrainiumDevice.has_grouped_gemm

    def __init__(self, generation: str, lnc: int) -> None:
        self.generation: str = generation
        self.lnc = lnc
