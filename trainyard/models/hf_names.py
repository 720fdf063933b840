"""Between our parameter names and Hugging Face's: one table per family (what reads it: checkpoint/formats/hf.py).

The table's left side is a blueprint part (what a parameter is called unfused); several parts may live in one Hugging
Face tensor (GPT-2's c_attn), in the order of the table.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class HfTensor:
    name: str
    transposed: bool = False
    """Stored [in, out] (GPT-2's Conv1D) where ours is [out, in]."""


@dataclass(frozen=True)
class HfNameMap:
    table: dict[str, HfTensor]
    tied: dict[str, str] = field(default_factory=dict)
    """Hugging Face names that are copies of another one (tied weights): read past, not written."""
