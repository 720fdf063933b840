"""Time at peak rates, and the fraction of each rate that runs reach."""

from typing import NamedTuple

from trainyard.preflight.plan.hardware.spec import Hardware


class Efficiency(NamedTuple):
    """Fraction of each peak rate that runs reach, 0 to 1."""

    matmul: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    network: float = 1.0


_TRN1 = Efficiency(0.74, 0.74, 0.26, 0.44, 0.26)
_HOPPER = Efficiency(0.66, 0.61, 0.63, 0.7, 0.7)
FITTED_EFFICIENCY = {
    "trn1": _TRN1,
    "trn2": _TRN1,
    "trn3": _TRN1,
    "gpu": _HOPPER,
    "cpu": Efficiency(0.8, 0.4, 0.5, 1.0, 1.0),
}
"""By Trainium generation or device kind. trn1 and gpu are the rounded fits of bench/calibrate.py. No training speed is
published for trn2 and trn3, which use the values of trn1. Link and network of GPUs are guesses; so are all values of a
CPU, whose peak rates are measured."""


class IdealTime(NamedTuple):
    """Seconds at peak rates for each resource; `fixed` seconds depend on no rate."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    network: float = 0.0
    fixed: float = 0.0

    def at_efficiency(self, efficiency: Efficiency) -> float:
        return sum(ideal / fraction for ideal, fraction in zip(self, (*efficiency, 1.0), strict=True))

    def plus(self, other: "IdealTime", times: float = 1.0) -> "IdealTime":
        return IdealTime(*(a + b * times for a, b in zip(self, other, strict=True)))


def fitted_efficiency(hardware: Hardware) -> Efficiency:
    return FITTED_EFFICIENCY[hardware.entry.generation or hardware.entry.kind]
