"""Detect which Trainium this machine has without starting the runtime, whose first user owns the cores."""

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from trainyard.devices.neuron.topology import CHIPS

PLATFORM_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""AWS's variable for machines that cannot tell their type, such as containers and compile hosts."""


class TrainiumInstance(NamedTuple):
    """The EC2 instance this process runs on."""

    generation: str | None
    """trn1, trn2 or trn3; None on any other machine."""
    chips: int
    """Chips that the driver reports."""
    instance_type: str
    """EC2 instance type, such as trn2.48xlarge."""


def parse_generation(product_name: str) -> str | None:
    """Generation of an instance type: trn1n.32xlarge is trn1, trn2u.48xlarge is trn2."""
    return next((name for name in CHIPS if product_name.lower().startswith(name)), None)


def detect_instance(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> TrainiumInstance:
    """Read the instance type, which EC2 puts into the DMI product name, and count the device files."""
    try:
        product_name = (root / "sys/devices/virtual/dmi/id/product_name").read_text().strip()
    except (OSError, UnicodeDecodeError):
        product_name = ""
    chips = sum(path.name.removeprefix("neuron").isdigit() for path in (root / "dev").glob("neuron*"))
    return TrainiumInstance(
        parse_generation(environ.get(PLATFORM_VARIABLE, "")) or parse_generation(product_name), chips, product_name
    )


def installed_version(package: str) -> tuple[int, int] | None:
    """Major and minor version of a package; None if it is not installed."""
    try:
        major, minor, *_ = metadata.version(package).split(".")
        return int(major), int(minor)
    except (metadata.PackageNotFoundError, ValueError):
        return None
