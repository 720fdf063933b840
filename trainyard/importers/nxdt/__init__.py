"""Import of NxD Training (NxDT) YAML files. Recognizing such a file does not load the importer."""

from typing import Any

NXDT_SECTIONS = {"trainer", "exp_manager", "distributed_strategy"}
"""Top-level sections of NxDT files that our schema does not have."""


def is_nxdt(data: dict[str, Any]) -> bool:
    """Return True if a YAML file has the structure of NxD Training's."""
    model = data.get("model")
    is_ours = isinstance(model, dict) and bool({"family", "from_hf"} & set(model))
    return not is_ours and ("model_source" in data or len(NXDT_SECTIONS & set(data)) > 1)
