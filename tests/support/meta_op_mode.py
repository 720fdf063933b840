"""A dispatch mode that runs steps on the meta device and shows every operator to its subclass."""

from typing import Any

import torch

from trainyard import compat
from trainyard.parallel import ring_attention
from trainyard.preflight.dryrun.meta_ops import NOT_REPLACED, stand_in

OPAQUE_OPS = {
    torch.ops.trainyard.context_attention.default: ring_attention.context_attention,
    torch.ops.trainyard.context_attention_backward.default: ring_attention.context_attention_backward,
}
"""Custom operators whose rules for the meta device do not show what they send and allocate."""


class MetaOpMode(compat.DispatchMode):  # type: ignore[no-untyped-call]
    """Runs a step on the meta device. Subclasses observe the operators, those inside opaque ones included."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in OPAQUE_OPS:
            with self:
                return compat.custom_op_body(OPAQUE_OPS[function])(*args, **kwargs)
        out = stand_in(function, args, kwargs)
        if out is NOT_REPLACED:
            out = function(*args, **kwargs)
        self.observe(function, args, out)
        return out

    def observe(self, function: Any, args: Any, out: Any) -> None:
        """Called after each operator."""
