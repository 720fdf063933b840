"""A Trainium without memory: the meta device with the rank order and group rules of the chip.

For audits on machines without the chip; it computes nothing, and `select` never returns it.
"""

from collections.abc import Sequence

from trainyard.devices.meta import MetaDevice
from trainyard.devices.neuron.device import NeuronDevice
from trainyard.devices.neuron.topology import group_problem, rank_order


class MetaTrainium(MetaDevice):
    max_logits_bytes = NeuronDevice.max_logits_bytes
    decomposes_attention = NeuronDevice.decomposes_attention

    def __init__(self, generation: str, lnc: int) -> None:
        self.generation, self.lnc = generation, lnc

    def rank_order(self, tp: int, world_size: int) -> list[int] | None:
        order = rank_order(self.generation, self.lnc, tp, world_size)
        return None if order == sorted(order) else order

    def supports_group(self, ranks: Sequence[int]) -> bool:
        return group_problem(self.generation, self.lnc, "all_reduce", ranks) is None
