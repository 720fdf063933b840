"""Which Trainium this machine has, found out without waking its runtime: whoever does that first owns the cores."""

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from trainyard.devices.neuron.topology import CHIPS

PLATFORM_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""AWS's own variable for machines that cannot tell what they are (containers, compile hosts)."""


class TrainiumInstance(NamedTuple):
    generation: str | None
    """trn1, trn2 or trn3; None on any other machine."""
    chips: int
    """That the driver shows."""
    instance_type: str
    """As EC2 calls it."""


def parse_generation(product: str) -> str | None:
    """trn1n.32xlarge and trn2u.48xlarge belong to trn1 and trn2."""
    return next((name for name in CHIPS if product.lower().startswith(name)), None)


def detect_instance(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> TrainiumInstance:
    """EC2 writes the instance type where other machines have the maker's name for theirs."""
    try:
        product = (root / "sys/devices/virtual/dmi/id/product_name").read_text().strip()
    except (OSError, UnicodeDecodeError):
        product = ""
    chips = sum(path.name.removeprefix("neuron").isdigit() for path in (root / "dev").glob("neuron*"))
    return TrainiumInstance(
        parse_generation(environ.get(PLATFORM_VARIABLE, "")) or parse_generation(product), chips, product
    )


def installed_version(package: str) -> tuple[int, int] | None:
    """Major and minor of an installed package."""
    try:
        major, minor, *_ = metadata.version(package).split(".")
        return int(major), int(minor)
    except (metadata.PackageNotFoundError, ValueError):
        return None
