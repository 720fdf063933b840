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

from trainyard.devices.cuda import DATA_SHEET_FLOPS
from trainyard.devices.neuron.topology import CHIPS, LNC_CHOICES

GIB = 2**30
TB = 1e12
GB = 1e9
LINK_LATENCY_S, NETWORK_LATENCY_S = 10e-6, 30e-6
"""Seconds that a message takes however small: between devices of an instance, and between instances."""


@dataclass(frozen=True)
class CatalogEntry:
    """One instance, or one server of GPUs."""

    kind: str
    """trainium, gpu or cpu: what memory and time models tell apart."""
    devices: int
    """Chips or GPUs of an instance."""
    bf16_flops: float
    """Dense FLOP/s of a device, and so for the next two."""
    fp8_flops: float
    fp32_flops: float
    memory: int
    """Bytes of a device that a run can use."""
    memory_bandwidth: float
    """Bytes/s of a device's memory."""
    link_bandwidth: float
    """Bytes/s out of a device to the others of its instance."""
    network_bandwidth: float
    """Bytes/s out of an instance."""
    host_memory: int
    """Bytes of host memory of an instance; 0 where it depends on the server."""
    ranks_per_device: dict[int, int] = field(default_factory=lambda: {1: 1})
    """Ranks on a device, by LNC (physical cores that a rank drives); the first is usual."""
    generation: str = ""
    """Of Trainium."""
    count_unit: str = "instances"
    """What NAME:COUNT counts."""
    price_per_hour: float | None = None
    """Dollars an hour for an instance."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where numbers come from; `all` for those not named."""
    link_latency: float = LINK_LATENCY_S
    network_latency: float = NETWORK_LATENCY_S


def trainium_entry(
    generation: str,
    devices: int,
    memory_bandwidth: float,
    link_bandwidth: float,
    network_bandwidth: float,
    host_memory: int,
    price_per_hour: float | None = None,
    why: Mapping[str, str] = MappingProxyType({}),
) -> CatalogEntry:
    chip = CHIPS[generation]
    sizes = (chip.bf16_flops, chip.fp8_flops, chip.fp32_flops, chip.memory_bytes)
    ranks = {lnc: chip.cores // lnc for lnc in LNC_CHOICES[generation]}
    sources = {"all": "aws", "link_latency": "guess", "network_latency": "guess", "price_per_hour": "none found", **why}
    rates = (memory_bandwidth, link_bandwidth, network_bandwidth)
    return CatalogEntry(
        "trainium",
        devices,
        *sizes,
        *rates,
        host_memory,
        ranks,
        generation,
        price_per_hour=price_per_hour,
        sources=sources,
    )


def gpu_entry(
    name: str, memory: float, memory_bandwidth: float, price_per_hour: float, price_source: str
) -> CatalogEntry:
    bf16, fp32 = DATA_SHEET_FLOPS[name]
    why = {
        "all": "nvidia",
        "memory": "seen",
        "network_bandwidth": "ec2: EFA, 3,200 Gbit/s",
        "host_memory": "ec2",
        "price_per_hour": price_source,
        "link_latency": "guess",
        "network_latency": "guess",
    }
    rates = (memory_bandwidth, 450 * GB, 400 * GB)
    return CatalogEntry(
        "gpu",
        8,
        bf16,
        2 * bf16,
        fp32,
        int(memory * GIB),
        *rates,
        2048 * GIB,
        count_unit="devices",
        price_per_hour=price_per_hour,
        sources=why,
    )


TRN1_PRICE_SOURCE = "1.34 a chip on demand, cloudexpat.com/blog/aws-trainium-vs-nvidia-h100, 2026"
P5_PRICE_SOURCE = "p5.48xlarge on demand, us-east-1, 2026-11-09 (datareceipts/data-receipts, hyperscalers.json)"
P5E_PRICE_SOURCE = "p5e.48xlarge as a capacity block, us-east-2, 2024-12 (aws.amazon.com/ec2/capacityblocks/pricing)"
TRN1_BANDWIDTHS, TRN2_BANDWIDTHS, TRN3_BANDWIDTHS = (820 * GIB, 384 * GB), (2.9 * TB, 1024 * GB), (4.9 * TB, 2560 * GB)
"""Memory bandwidth and NeuronLink of a chip."""
TRN2_3XLARGE_SOURCES = {"network_bandwidth": "guess: its share of trn2.48xlarge", "host_memory": "guess: its share of trn2.48xlarge"}
TRN2U_SOURCES = {"all": "aws: UltraServer of four; the 256 GB/s a chip between them are not modelled apart"}
TRN3_SOURCES = {"network_bandwidth": "guess: 200 Gbit/s a chip, as trn2", "host_memory": "guess: as trn2u"}
TRN1_SOURCES = {"price_per_hour": TRN1_PRICE_SOURCE}
CATALOG: dict[str, CatalogEntry] = {
    "trn1.2xlarge": trainium_entry(
        "trn1", 1, *TRN1_BANDWIDTHS, 25e9 / 8, 32 * GIB, price_per_hour=1.34, why=TRN1_SOURCES
    ),
    "trn1.32xlarge": trainium_entry(
        "trn1", 16, *TRN1_BANDWIDTHS, 800e9 / 8, 512 * GIB, price_per_hour=21.50, why=TRN1_SOURCES
    ),
    "trn1n.32xlarge": trainium_entry("trn1", 16, *TRN1_BANDWIDTHS, 1600e9 / 8, 512 * GIB),
    "trn2.3xlarge": trainium_entry("trn2", 1, *TRN2_BANDWIDTHS, 200e9 / 8, 128 * GIB, why=TRN2_3XLARGE_SOURCES),
    "trn2.48xlarge": trainium_entry("trn2", 16, *TRN2_BANDWIDTHS, 3200e9 / 8, 2048 * GIB),
    "trn2u": trainium_entry("trn2", 64, *TRN2_BANDWIDTHS, 4 * 3200e9 / 8, 8192 * GIB, why=TRN2U_SOURCES),
    "trn3.gen1": trainium_entry("trn3", 64, *TRN3_BANDWIDTHS, 64 * 25 * GB, 8192 * GIB, why=TRN3_SOURCES),
    "trn3.gen2": trainium_entry("trn3", 144, *TRN3_BANDWIDTHS, 144 * 25 * GB, 18432 * GIB, why=TRN3_SOURCES),
    "h100": gpu_entry("H100", 79.1, 3.35 * TB, 55.04, P5_PRICE_SOURCE),
    "h200": gpu_entry("H200", 139.8, 4.8 * TB, 43.26, P5E_PRICE_SOURCE),
}
