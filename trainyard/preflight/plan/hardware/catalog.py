"""Catalog of hardware, with the source of every number.

Sources, as `CatalogEntry.sources` names them:
- aws: the Neuron documentation, about-neuron/arch/neuron-hardware (Neuron 2.32, 2026-08).
- nvidia: NVIDIA's data sheets of the SXM parts.
- ec2: the instances that carry these parts (p5.48xlarge, p5en.48xlarge).
- seen: torch on the part itself (docs/lab/performance.md).
- guess: no published figure. All latencies are guesses, of the size that users report.

Prices are dollars an hour on demand, with the date and page they were read from; None if no public page names one.
Yours may differ: use --price, or a file for --hardware-file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from trainyard.core.constants import GIB
from trainyard.devices.builtin import cuda, neuron, xla
from trainyard.devices.kind import DeviceKind
from trainyard.devices.neuron.topology import CHIPS, LNC_CHOICES

TB = 1e12
GB = 1e9
LINK_LATENCY_S, NETWORK_LATENCY_S = 10e-6, 30e-6
"""Time of the smallest message between devices of an instance, and between instances."""


@dataclass(frozen=True)
class CatalogEntry:
    """One instance, or one server of GPUs."""

    kind: DeviceKind
    """The kind of its devices; in a file for --hardware-file the name of one, as in device.name."""
    devices: int
    """Chips or GPUs of an instance."""
    bf16_flops: float
    """Dense FLOP/s of a device; the same for the next two."""
    fp8_flops: float
    fp32_flops: float
    memory: int
    """Bytes of a device that a run can use."""
    memory_bandwidth: float
    """Bytes/s of a device's memory."""
    link_bandwidth: float
    """Bytes/s from a device to the others of its instance."""
    network_bandwidth: float
    """Bytes/s out of an instance."""
    host_memory: int
    """Bytes of host memory of an instance; 0 if it depends on the server."""
    ranks_per_device: dict[int, int] = field(default_factory=lambda: {1: 1})
    """Ranks on a device by LNC (physical cores per rank); the first is the default."""
    generation: str = ""
    """Generation of Trainium."""
    count_unit: str = "instances"
    """What NAME:COUNT counts: instances or devices."""
    price_per_hour: float | None = None
    """Dollars an hour for an instance."""
    sources: dict[str, str] = field(default_factory=dict)
    """Source of each field; `all` for fields that are not named."""
    link_latency: float = LINK_LATENCY_S
    network_latency: float = NETWORK_LATENCY_S


def trainium_entry(
    generation: str,
    devices: int,
    bandwidths: tuple[float, float],
    network_bandwidth: float,
    host_memory: int,
    price_per_hour: float | None = None,
    sources: Mapping[str, str] = MappingProxyType({}),
) -> CatalogEntry:
    """`bandwidths` are those of a chip's memory and of its NeuronLink."""
    chip = CHIPS[generation]
    guesses = dict.fromkeys(("link_latency", "network_latency"), "guess")
    return CatalogEntry(
        kind=(xla if generation == "trn1" else neuron).DEVICE,
        devices=devices,
        bf16_flops=chip.bf16_flops,
        fp8_flops=chip.fp8_flops,
        fp32_flops=chip.fp32_flops,
        memory=chip.memory_bytes,
        memory_bandwidth=bandwidths[0],
        link_bandwidth=bandwidths[1],
        network_bandwidth=network_bandwidth,
        host_memory=host_memory,
        ranks_per_device={lnc: chip.cores // lnc for lnc in LNC_CHOICES[generation]},
        generation=generation,
        price_per_hour=price_per_hour,
        sources={"all": "aws", **guesses, "price_per_hour": "none found", **sources},
    )


def gpu_entry(
    name: str, memory_gib: float, memory_bandwidth: float, price_per_hour: float, price_source: str
) -> CatalogEntry:
    bf16, fp32 = cuda.DATA_SHEET_FLOPS[name]
    return CatalogEntry(
        kind=cuda.DEVICE,
        devices=8,
        bf16_flops=bf16,
        fp8_flops=2 * bf16,
        fp32_flops=fp32,
        memory=int(memory_gib * GIB),
        memory_bandwidth=memory_bandwidth,
        link_bandwidth=450 * GB,
        network_bandwidth=400 * GB,
        host_memory=2048 * GIB,
        count_unit="devices",
        price_per_hour=price_per_hour,
        sources={
            "all": "nvidia",
            "memory": "seen",
            "network_bandwidth": "ec2: EFA, 3,200 Gbit/s",
            "host_memory": "ec2",
            "price_per_hour": price_source,
            "link_latency": "guess",
            "network_latency": "guess",
        },
    )


P5_PRICE = "p5.48xlarge on demand, us-east-1, 2026-11-09 (datareceipts/data-receipts, hyperscalers.json)"
P5E_PRICE = "p5e.48xlarge as a capacity block, us-east-2, 2024-12 (aws.amazon.com/ec2/capacityblocks/pricing)"
TRN1 = (820 * GIB, 384 * GB)
TRN2 = (2.9 * TB, 1024 * GB)
TRN3 = (4.9 * TB, 2560 * GB)
TRN1_SOURCES = {"price_per_hour": "1.34 a chip on demand, cloudexpat.com/blog/aws-trainium-vs-nvidia-h100, 2026"}
TRN2_3XLARGE_SOURCES = dict.fromkeys(("network_bandwidth", "host_memory"), "guess: its share of trn2.48xlarge")
TRN2U_SOURCES = {"all": "aws: UltraServer of four; the 256 GB/s per chip between them are not modeled separately"}
TRN3_SOURCES = {"network_bandwidth": "guess: 200 Gbit/s per chip, as trn2", "host_memory": "guess: as trn2u"}
CATALOG: dict[str, CatalogEntry] = {
    "trn1.2xlarge": trainium_entry("trn1", 1, TRN1, 25e9 / 8, 32 * GIB, 1.34, TRN1_SOURCES),
    "trn1.32xlarge": trainium_entry("trn1", 16, TRN1, 800e9 / 8, 512 * GIB, 21.50, TRN1_SOURCES),
    "trn1n.32xlarge": trainium_entry("trn1", 16, TRN1, 1600e9 / 8, 512 * GIB),
    "trn2.3xlarge": trainium_entry("trn2", 1, TRN2, 200e9 / 8, 128 * GIB, sources=TRN2_3XLARGE_SOURCES),
    "trn2.48xlarge": trainium_entry("trn2", 16, TRN2, 3200e9 / 8, 2048 * GIB),
    "trn2u": trainium_entry("trn2", 64, TRN2, 4 * 3200e9 / 8, 8192 * GIB, sources=TRN2U_SOURCES),
    "trn3.gen1": trainium_entry("trn3", 64, TRN3, 64 * 25 * GB, 8192 * GIB, sources=TRN3_SOURCES),
    "trn3.gen2": trainium_entry("trn3", 144, TRN3, 144 * 25 * GB, 18432 * GIB, sources=TRN3_SOURCES),
    "h100": gpu_entry("H100", 79.1, 3.35 * TB, 55.04, P5_PRICE),
    "h200": gpu_entry("H200", 139.8, 4.8 * TB, 43.26, P5E_PRICE),
}
