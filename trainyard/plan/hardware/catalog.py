"""The hardware that a plan may be for: one entry for each, with the source of every number.

Sources, as `why` names them:
- aws: the Neuron documentation, about-neuron/arch/neuron-hardware (Neuron 2.32, 2026-08).
- nvidia: NVIDIA's data sheets of the SXM parts.
- ec2: the instances that carry these parts (p5.48xlarge, p5en.48xlarge).
- seen: torch on the part itself (docs/performance.md).
- guess: nobody's figure. Latencies are all guesses, of the size that users report.

Prices are dollars an hour on demand, with the day and place they were read; None where no public page was found that
names one. Yours differ: --price, or a file for --hardware-file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from trainyard.devices.cuda import DATA_SHEET
from trainyard.devices.neuron.topology import CHIPS, LNC

GIB = 2**30
TB = 1e12
GB = 1e9
HOP, JUMP = 10e-6, 30e-6
"""Seconds that a message takes however small: between devices of an instance, and between instances."""


@dataclass(frozen=True)
class Entry:
    """One instance, or one server of GPUs."""

    kind: str
    """trainium, gpu or cpu: what memory and time models tell apart."""
    devices: int
    """Chips or GPUs of an instance."""
    bf16: float
    """Dense FLOP/s of a device, and so for the next two."""
    fp8: float
    fp32: float
    memory: int
    """Bytes of a device that a run can use."""
    bandwidth: float
    """Bytes/s of a device's memory."""
    link: float
    """Bytes/s out of a device to the others of its instance."""
    network: float
    """Bytes/s out of an instance."""
    host: int
    """Bytes of host memory of an instance; 0 where it depends on the server."""
    ranks: dict[int, int] = field(default_factory=lambda: {1: 1})
    """Ranks on a device, by LNC (physical cores that a rank drives); the first is usual."""
    generation: str = ""
    """Of Trainium."""
    counted: str = "instances"
    """What NAME:COUNT counts."""
    price: float | None = None
    """Dollars an hour for an instance."""
    why: dict[str, str] = field(default_factory=dict)
    """Where numbers come from; `all` for those not named."""
    hop: float = HOP
    jump: float = JUMP


def trainium(
    generation: str,
    devices: int,
    bandwidth: float,
    link: float,
    network: float,
    host: int,
    price: float | None = None,
    why: Mapping[str, str] = MappingProxyType({}),
) -> Entry:
    chip = CHIPS[generation]
    sizes = (chip.bf16, chip.fp8, chip.fp32, chip.memory)
    ranks = {lnc: chip.cores // lnc for lnc in LNC[generation]}
    sources = {"all": "aws", "hop": "guess", "jump": "guess", "price": "none found", **why}
    rates = (bandwidth, link, network)
    return Entry("trainium", devices, *sizes, *rates, host, ranks, generation, price=price, why=sources)


def gpu(name: str, memory: float, bandwidth: float, price: float, paid: str) -> Entry:
    bf16, fp32 = DATA_SHEET[name]
    why = {
        "all": "nvidia",
        "memory": "seen",
        "network": "ec2: EFA, 3,200 Gbit/s",
        "host": "ec2",
        "price": paid,
        "hop": "guess",
        "jump": "guess",
    }
    rates = (bandwidth, 450 * GB, 400 * GB)
    return Entry(
        "gpu", 8, bf16, 2 * bf16, fp32, int(memory * GIB), *rates, 2048 * GIB, counted="devices", price=price, why=why
    )


TRN1_PRICE = "1.34 a chip on demand, cloudexpat.com/blog/aws-trainium-vs-nvidia-h100, 2026"
P5 = "p5.48xlarge on demand, us-east-1, 2026-11-09 (datareceipts/data-receipts, hyperscalers.json)"
P5E = "p5e.48xlarge as a capacity block, us-east-2, 2024-12 (aws.amazon.com/ec2/capacityblocks/pricing)"
TRN1, TRN2, TRN3 = (820 * GIB, 384 * GB), (2.9 * TB, 1024 * GB), (4.9 * TB, 2560 * GB)
"""Memory bandwidth and NeuronLink of a chip."""
SHARE = {"network": "guess: its share of trn2.48xlarge", "host": "guess: its share of trn2.48xlarge"}
ULTRA = {"all": "aws: UltraServer of four; the 256 GB/s a chip between them are not modelled apart"}
THIRD = {"network": "guess: 200 Gbit/s a chip, as trn2", "host": "guess: as trn2u"}
PAID = {"price": TRN1_PRICE}
TABLE: dict[str, Entry] = {
    "trn1.2xlarge": trainium("trn1", 1, *TRN1, 25e9 / 8, 32 * GIB, price=1.34, why=PAID),
    "trn1.32xlarge": trainium("trn1", 16, *TRN1, 800e9 / 8, 512 * GIB, price=21.50, why=PAID),
    "trn1n.32xlarge": trainium("trn1", 16, *TRN1, 1600e9 / 8, 512 * GIB),
    "trn2.3xlarge": trainium("trn2", 1, *TRN2, 200e9 / 8, 128 * GIB, why=SHARE),
    "trn2.48xlarge": trainium("trn2", 16, *TRN2, 3200e9 / 8, 2048 * GIB),
    "trn2u": trainium("trn2", 64, *TRN2, 4 * 3200e9 / 8, 8192 * GIB, why=ULTRA),
    "trn3.gen1": trainium("trn3", 64, *TRN3, 64 * 25 * GB, 8192 * GIB, why=THIRD),
    "trn3.gen2": trainium("trn3", 144, *TRN3, 144 * 25 * GB, 18432 * GIB, why=THIRD),
    "h100": gpu("H100", 79.1, 3.35 * TB, 55.04, P5),
    "h200": gpu("H200", 139.8, 4.8 * TB, 43.26, P5E),
}
