"""Types of the Hugging Face name maps. Each family has one map; checkpoint/formats/hf.py reads it.

Keys are blueprint parts (the parameter names without fusion). Several parts may map to one Hugging Face tensor (GPT-2's
c_attn), which then holds them in the order of the map.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint."""

    name: str
    transposed: bool = False
    """Stored as [in, out] (GPT-2's Conv1D) instead of our [out, in]."""


@dataclass(frozen=True)
class HfNameMap:
    """Our parameter names to Hugging Face tensors."""

    table: dict[str, HfTensor]
    tied: dict[str, str] = field(default_factory=dict)
    """Hugging Face names that repeat another tensor (tied weights): ignored when reading, not written."""
