"""Compares two checkpoints bit for bit, one tensor at a time."""

import torch

from trainyard.checkpoint.formats.tensor_map import TrainingState, unfused_tensors


def first_difference(source: TrainingState, target: TrainingState, dtype: torch.dtype | None) -> str | None:
    """The name of the first tensor of the source that the target does not hold bit for bit, rounded to `dtype`.

    Without `dtype`, the target may have a wider one, which holds the same values.
    """
    for kind in source.dtypes:
        for name, tensor in unfused_tensors(source.model).items():
            a, b = (state.readers[kind](tensor) for state in (source, target))
            expected = dtype or torch.promote_types(a.dtype, b.dtype)
            a, b = a.to(expected).contiguous(), b.contiguous()
            if a.dtype != b.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                return name if kind == "weights" else f"{kind} of {name}"
    return None
