"""Which NeuronCores make good tensor-parallel groups: not always neighbours, and not every size.

As NxD arranges them (neuronx_distributed 0.18, parallel_layers/parallel_state.py). On a trn1.32xlarge, 32 cores on 16
chips in a torus, groups of four are every eighth core. On a trn2.48xlarge with two cores seen as one (LNC 2), 64 of
them in four rows of 16, groups of 32 are rows 0 and 3 and rows 1 and 2; with LNC 1 the same holds for 128 cores and
groups of 64.
"""

from trainyard.errors import UserError

CORES = {("trn1", 1): 32, ("trn2", 1): 128, ("trn2", 2): 64}
"""Ranks of an instance by generation and LNC (physical cores that one rank drives)."""
REFUSED = {("trn2", 2, 8), ("trn2", 1, 16)}
"""(generation, LNC, tp) that the runtime does not support."""


def rank_order(generation: str, lnc: int, tp: int, ranks: int) -> list[int]:
    """The rank at each place of a layout: place i of `[pp][dp][cp][tp]` is core `order[i]`."""
    if (generation, lnc) not in CORES:
        known = ", ".join(f"{name} with LNC {size}" for name, size in CORES)
        raise UserError(f"{generation} with LNC {lnc}: not known; here: {known}")
    if (generation, lnc, tp) in REFUSED:
        raise UserError(f"layout.tp={tp}: not supported on {generation} with LNC {lnc}; nearest: {tp // 2} or {tp * 2}")
    cores = CORES[generation, lnc]
    node = _node(generation, cores, tp)
    if ranks % cores or node is None:
        return list(range(ranks))
    return [first + core for first in range(0, ranks, cores) for core in node]


def _node(generation: str, cores: int, tp: int) -> list[int] | None:
    """Within one instance; None: neighbours."""
    if generation == "trn1" and tp == 4:
        return [core for first in range(8) for core in range(first, cores, 8)]
    if generation == "trn2" and tp == cores // 2:
        row = cores // 4
        rows = [range(number * row, (number + 1) * row) for number in range(4)]
        return [*rows[0], *rows[3], *rows[1], *rows[2]]
    return None
