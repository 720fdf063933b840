"""The hardware of a plan: NAME:COUNT from the catalog, from a user's file, or this machine's CPU."""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import yaml

from trainyard.config.layout_schema import LayoutSection
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.devices.kind import DeviceKind
from trainyard.devices.registry import DEVICES
from trainyard.preflight.plan.hardware.catalog import CATALOG, CatalogEntry

HARDWARE_FORM = "NAME:COUNT, such as trn1.32xlarge:16, h200:8 or cpu:4; trn2.48xlarge:8:lnc1 for another LNC"
MAX_RANKS = 2**17
"""Most ranks of a plan."""
FILE_EXAMPLE = "my-h200: {like: h200, price_per_hour: 20}"


@dataclass(frozen=True)
class Hardware:
    """A number of catalog entries. Rates and memory are those of one rank."""

    name: str
    entry: CatalogEntry
    count: int
    """Number of `entry.count_unit`: instances or devices."""
    lnc: int = 1

    @property
    def ranks_per_device(self) -> int:
        return self.entry.ranks_per_device[self.lnc]

    @property
    def ranks_per_node(self) -> int:
        """Ranks on one instance."""
        if self.entry.count_unit == "devices":
            return min(self.count, self.entry.devices) * self.ranks_per_device
        return self.entry.devices * self.ranks_per_device

    @property
    def ranks(self) -> int:
        devices = self.count * (1 if self.entry.count_unit == "devices" else self.entry.devices)
        return devices * self.ranks_per_device

    @property
    def instances(self) -> float:
        """Billed instances; fractional if only some of an instance's devices are used."""
        return self.count if self.entry.count_unit == "instances" else self.count / self.entry.devices

    @property
    def memory(self) -> int:
        """Bytes of one rank."""
        return self.entry.memory // self.ranks_per_device

    def peak_flops(self, dtype: str) -> float:
        """Dense FLOP/s of one rank in bf16, fp8 or fp32."""
        flops: float = getattr(self.entry, f"{dtype}_flops")
        return flops / self.ranks_per_device

    @property
    def memory_bandwidth(self) -> float:
        return self.entry.memory_bandwidth / self.ranks_per_device

    @property
    def link_bandwidth(self) -> float:
        return self.entry.link_bandwidth / self.ranks_per_device

    def describe(self) -> str:
        ranks = counted(self.ranks, "rank")
        if self.name == "cpu":
            return f"this machine's CPU, {ranks}"
        lnc = f" at LNC {self.lnc}" if len(self.entry.ranks_per_device) > 1 else ""
        return f"{self.count} x {self.name}{lnc}, {ranks}"


def parse_hardware(
    text: str,
    catalog: dict[str, CatalogEntry] | None = None,
    measure: Callable[[int], CatalogEntry] | None = None,
) -> Hardware:
    """Parse NAME[:COUNT[:lncN]]. `measure(ranks)` measures this machine's CPU for the name `cpu`."""
    catalog = catalog or CATALOG
    name, *rest = text.split(":")
    match = re.fullmatch(r"(\d{1,9})(?::lnc(\d))?", ":".join(rest) or "1")
    if not match or not int(match[1]):
        raise UserError(f"--hardware {text}: expected {HARDWARE_FORM}")
    count = int(match[1])
    too_many = UserError(f"--hardware {text}: a plan has at most {MAX_RANKS:,} ranks")
    if count > MAX_RANKS:
        raise too_many
    if name == "cpu" and measure:
        return Hardware("cpu", measure(count), 1)
    if name not in catalog and (sizes := [known for known in catalog if known.startswith(f"{name}.")]):
        name = max(sizes, key=lambda size: catalog[size].devices)  # trn2 is trn2.48xlarge
    if name not in catalog:
        nearest = difflib.get_close_matches(name, [*catalog, "cpu"], 1, 0.0)[0]
        raise UserError(f"--hardware {name}: unknown; nearest: {nearest}; known: {', '.join([*catalog, 'cpu'])}")
    entry = catalog[name]
    lnc = int(match[2]) if match[2] else next(iter(entry.ranks_per_device))
    if lnc not in entry.ranks_per_device:
        raise UserError(f"--hardware {text}: {name} has LNC {' or '.join(map(str, entry.ranks_per_device))}")
    hardware = Hardware(name, entry, count, lnc)
    if hardware.ranks > MAX_RANKS:
        raise too_many
    return hardware


def needed_hardware(hardware: str, layout: LayoutSection, lnc: int | None = None) -> str:
    """What a file names as its `hardware`, in the form of `parse_hardware`; this CPU if that is not in the catalog.

    layout.ranks, if it is set, determines how many instances or devices.
    """
    match = re.search(r"(\d+) x (\S+)", hardware)
    if match and match[2] in CATALOG:
        one = parse_hardware(f"{match[2]}:1" + (f":lnc{lnc}" if lnc else ""))
        count = -(-layout.ranks // one.ranks) if layout.ranks else int(match[1])
        return f"{match[2]}:{count}:lnc{one.lnc}"
    return f"cpu:{layout.ranks or layout.tp * layout.pp * layout.cp}"


def _find_kind(name: str, label: str) -> DeviceKind:
    try:
        return DEVICES.find(name)
    except UserError as error:
        raise UserError(f"{label}: {error}") from None


def read_catalog(path: Path) -> dict[str, CatalogEntry]:
    """The catalog with a user's entries: names to fields, where `like` names the entry that has all other fields."""
    try:
        entries = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--hardware-file {path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(entries, dict) or not all(isinstance(values, dict) for values in entries.values()):
        raise UserError(f"--hardware-file {path}: not a mapping of names to fields, such as {FILE_EXAMPLE}")
    catalog = dict(CATALOG)
    known = {field.name for field in fields(CatalogEntry)}
    for name, values in entries.items():
        like = values.pop("like", name)
        if like not in catalog:
            raise UserError(f"--hardware-file {path}: {name}: like={like} is unknown; known: {', '.join(catalog)}")
        for key, value in values.items():
            if key == "kind":
                value = values[key] = _find_kind(str(value), f"--hardware-file {path}: {name}.kind={value}")
            if key not in known:
                nearest = difflib.get_close_matches(key, [*known, "like"], 1, 0.0)[0]
                raise UserError(f"--hardware-file {path}: {name}.{key}: unknown; nearest: {nearest}")
            example = getattr(CATALOG["h200"], key)
            numeric = isinstance(example, int | float) and isinstance(value, int | float) and value > 0
            if not numeric and type(value) is not type(example):
                expected = type(example).__name__
                raise UserError(f"--hardware-file {path}: {name}.{key}={value}: expected a {expected} above 0")
        sources = {**catalog[like].sources, **dict.fromkeys(values, str(path))}
        catalog[str(name)] = replace(catalog[like], **values, sources=sources)
    return catalog
