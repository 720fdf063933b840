"""Assigns each operator of a forward and a backward pass to the part of the stage that it belongs to."""

from bisect import bisect_right
from typing import Any

from trainyard import compat
from trainyard.preflight.dryrun.meta_ops import NOT_REPLACED, stand_in
from trainyard.preflight.plan.trace.shape_rules import NO_RULE, shape_rule

EMBEDDING, LOSS, HEAD = -1, -2, -3
"""Parts of a stage besides its layers, which have their index."""


class PartRecorder(compat.EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators on shapes and shows each one to a subclass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_backward = False
        self.parts: list[int] = []
        """The parts in the order of the forward pass."""
        self.first_nodes: list[int] = []
        """Id of the first autograd node of each part."""
        self.last_part = EMBEDDING

    def enter(self, part: int) -> None:
        """The forward pass begins a part."""
        self.parts.append(part)
        self.first_nodes.append(compat.last_forward_node_id() + 1)

    @property
    def part(self) -> int:
        """The part that runs now. Recomputed operators belong to the part whose backward pass needs them."""
        if not self.in_backward:
            return self.parts[-1]
        node = compat.current_backward_node_id()
        if node is not None and self.first_nodes[0] <= node < 1 << 62:  # gradients of leaves have the highest id
            self.last_part = self.parts[bisect_right(self.first_nodes, node) - 1]
        return self.last_part

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with compat.disable_torch_functions():  # DeviceMode would see every attribute that the rules read
            out = stand_in(function, args, kwargs)
            if out is NOT_REPLACED:
                out = shape_rule(function, args, kwargs)
            if out is NO_RULE:
                out = function(*args, **kwargs)
            self.observe(function, args, kwargs, out)
        return out

    def end_forward(self) -> None:
        """Called between forward and backward pass."""

    def observe(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Called after each operator."""

    def on_message(self, group: str, size: int, kind: str, tensor: Any) -> None:
        """Called for each message: the larger of its input and output."""
