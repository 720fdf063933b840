"""MegatronFormat: how a family is recognized in checkpoints of Megatron-LM."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MegatronModel:
    """What a checkpoint of Megatron-LM tells about its model."""

    args: Mapping[str, Any]
    """The stored arguments."""
    mlp_width: int
    """Rows of the first matrix of the MLP over all ranks; gate and up together where there is a gate."""
    positions: int | None
    """Rows of the position embedding, if there is one."""
    notes: list[str]
    """Assumptions to tell the user."""


@dataclass(frozen=True)
class MegatronFormat:
    """How one family is stored by Megatron-LM."""

    required_args: Mapping[str, object]
    """Arguments that identify the family. A missing one has the value given here."""
    read: Callable[[MegatronModel], dict[str, Any]]
    """Values of the family's own keys."""
    gated_mlp: bool
    """The MLP has a gate, stored with the up projection."""
