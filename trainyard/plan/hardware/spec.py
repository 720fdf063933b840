"""What a plan is for: NAME:COUNT from the table, from a file of one's own, or the CPU that is here, measured."""

import difflib
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.plan.hardware.catalog import CATALOG, CatalogEntry

HARDWARE_FORM = "NAME:COUNT, such as trn1.32xlarge:16, h200:8 or cpu:4; trn2.48xlarge:8:lnc1 for another LNC"


@dataclass(frozen=True)
class Hardware:
    """So many of an entry, seen from one rank."""

    name: str
    entry: CatalogEntry
    count: int
    """Of what the entry counts: instances or devices."""
    lnc: int = 1

    @property
    def ranks_per_device(self) -> int:
        return self.entry.ranks_per_device[self.lnc]

    @property
    def ranks_per_node(self) -> int:
        """Ranks of an instance."""
        if self.entry.count_unit == "devices":
            return min(self.count, self.entry.devices) * self.ranks_per_device
        return self.entry.devices * self.ranks_per_device

    @property
    def ranks(self) -> int:
        return self.count * self.ranks_per_device * (1 if self.entry.count_unit == "devices" else self.entry.devices)

    @property
    def instances(self) -> float:
        """That are paid for; a part of one where fewer devices are used."""
        return self.count if self.entry.count_unit == "instances" else self.count / self.entry.devices

    @property
    def memory(self) -> int:
        """Bytes of one rank."""
        return self.entry.memory // self.ranks_per_device

    def peak_flops(self, dtype: str) -> float:
        """Dense FLOP/s of one rank; kind: bf16, fp8 or fp32."""
        rate: float = getattr(self.entry, f"{dtype}_flops")
        return rate / self.ranks_per_device

    @property
    def memory_bandwidth(self) -> float:
        return self.entry.memory_bandwidth / self.ranks_per_device

    @property
    def link_bandwidth(self) -> float:
        return self.entry.link_bandwidth / self.ranks_per_device

    def describe(self) -> str:
        if self.entry.kind == "cpu":
            return f"this machine's CPU, {self.ranks} rank{'s' * (self.ranks > 1)}"
        lnc = f" at LNC {self.lnc}" if len(self.entry.ranks_per_device) > 1 else ""
        return f"{self.count} x {self.name}{lnc}, {self.ranks} rank{'s' * (self.ranks > 1)}"


def parse_hardware(text: str, catalog: dict[str, CatalogEntry] | None = None, measure: Any = None) -> Hardware:
    """From NAME[:COUNT[:lncN]]. `probe` measures the CPU that is here: (ranks) to an entry."""
    catalog = catalog or CATALOG
    name, *rest = text.split(":")
    match = re.fullmatch(r"(\d+)(?::lnc(\d+))?", ":".join(rest) or "1")
    if not match or not int(match[1]):
        raise UserError(f"--hardware {text}: not of the form {HARDWARE_FORM}")
    count = int(match[1])
    if name == "cpu" and measure:
        return Hardware("cpu", measure(count), 1)
    if name not in catalog:
        near = difflib.get_close_matches(name, [*catalog, "cpu"], 1, 0.0)[0]
        raise UserError(f"--hardware {name}: not known; nearest: {near}; here: {', '.join([*catalog, 'cpu'])}")
    entry = catalog[name]
    lnc = int(match[2]) if match[2] else next(iter(entry.ranks_per_device))
    if lnc not in entry.ranks_per_device:
        raise UserError(f"--hardware {text}: {name} has LNC {' or '.join(map(str, entry.ranks_per_device))}")
    return Hardware(name, entry, count, lnc)


def needed_hardware(config: Config) -> str:
    """What a file says it is meant for, as a word for `hardware`; the CPU that is here where it names nothing known."""
    match = re.search(r"(\d+) x (\S+)", config.hardware)
    if match and match[2] in CATALOG:
        return f"{match[2]}:{match[1]}"
    layout = config.layout
    return f"cpu:{layout.ranks or layout.tp * layout.pp * layout.cp}"


def read_catalog(path: Path) -> dict[str, CatalogEntry]:
    """The table with a user's entries: names to fields; `like` names the entry that the rest comes from."""
    try:
        found = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--hardware-file {path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise UserError(
            f"--hardware-file {path}: not a mapping of names to fields, such as my-h200: {{like: h200, price_per_hour: 20}}"
        )
    table = dict(CATALOG)
    known = {each.name: each for each in fields(CatalogEntry)}
    for name, values in found.items():
        like = values.pop("like", name)
        if like not in table:
            raise UserError(f"--hardware-file {path}: {name}: like={like} is not known; here: {', '.join(table)}")
        for key, value in values.items():
            if key not in known:
                near = difflib.get_close_matches(key, [*known, "like"], 1, 0.0)[0]
                raise UserError(f"--hardware-file {path}: {name}.{key}: unknown; nearest: {near}")
            wanted = getattr(CATALOG["h200"], key)
            numeric = isinstance(wanted, int | float) and isinstance(value, int | float) and value > 0
            if not numeric and type(value) is not type(wanted):
                raise UserError(f"--hardware-file {path}: {name}.{key}={value}: not a {type(wanted).__name__} above 0")
        table[str(name)] = replace(
            table[like], **values, sources={**table[like].sources, **dict.fromkeys(values, str(path))}
        )
    return table


def host_memory() -> int:
    return int(psutil.virtual_memory().total)
