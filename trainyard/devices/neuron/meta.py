"""A Trainium on paper: tensors without memory, in the groups and the order of ranks that the chip asks for.

For auditing a run where there is no such chip; it computes nothing. Never chosen by `select`.
"""

from collections.abc import Sequence

from trainyard.devices.meta import Nowhere
from trainyard.devices.neuron.device import Neuron
from trainyard.devices.neuron.topology import group_problem, rank_order


class OnPaper(Nowhere):
    logits_bytes = Neuron.logits_bytes
    traces_attention = Neuron.traces_attention

    def __init__(self, generation: str, lnc: int) -> None:
        self.generation, self.lnc = generation, lnc

    def order(self, tp: int, ranks: int) -> list[int] | None:
        order = rank_order(self.generation, self.lnc, tp, ranks)
        return None if order == sorted(order) else order

    def takes(self, ranks: Sequence[int]) -> bool:
        return group_problem(self.generation, self.lnc, "all_reduce", ranks) is None
