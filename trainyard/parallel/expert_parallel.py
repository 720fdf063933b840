"""Expert parallelism: ranks divide the experts, and an all-to-all brings each (token, expert) row to its expert.

How many rows a rank receives depends on the routing. No row is dropped, so the number is known only when the step runs:
the ranks exchange counts first, and the host waits for them once per layer.
"""

from typing import Any

import torch
from torch import Tensor

from trainyard import compat
from trainyard.parallel.process_group import Group


class ExpertAxis:
    """Ranks that divide the experts: rank r of n has experts [r E / n, (r + 1) E / n)."""

    def __init__(self, group: Group | None = None) -> None:
        self.group = group or Group()
        self.size, self.rank = self.group.size, self.group.rank

    def exchange_counts(self, count_E: Tensor) -> Tensor:
        """From the number of this rank's rows for each expert, int32: [2, size, experts of a rank], int64 on the host.
        [0, r, e]: rows that this rank sends to expert e of rank r. [1, r, e]: rows of rank r for expert e of this rank.
        """
        return exchange_counts(count_E, self.size, self.group.name)

    def dispatch(self, rows_ND: Tensor, counts: Tensor) -> Tensor:
        """The rows of all ranks for this rank's experts, sorted by expert, from rows that are sorted by expert."""
        return dispatch_rows(rows_ND, counts, self.group.name)

    def combine(self, rows_MD: Tensor, counts: Tensor, num_rows: int) -> Tensor:
        """The inverse of `dispatch`, for its `num_rows` rows."""
        return combine_rows(rows_MD, counts, num_rows, self.group.name)

    def exchange_slots(self, x: Tensor) -> Tensor:
        """x [size, ...] with one part for each rank to the parts that the ranks have for this one; its own inverse."""
        return x if self.size == 1 else _ExchangeSlots.apply(x, self.group)  # type: ignore[no-untyped-call]


@torch.library.custom_op("trainyard::exchange_counts", mutates_args=())
def exchange_counts(count_E: Tensor, size: int, group: str) -> Tensor:
    sent = count_E.view(size, -1)
    received = compat.wait(compat.all_to_all(sent, [1] * size, [1] * size, group))
    # The host waits for the device here: an all-to-all of rows takes its sizes from the host.
    return torch.stack((sent, received)).to("cpu", torch.int64)


@torch.library.custom_op("trainyard::dispatch_rows", mutates_args=())
def dispatch_rows(rows_ND: Tensor, counts: Tensor, group: str) -> Tensor:
    sent, received = counts.sum(2).tolist()
    rows_MD = compat.wait(compat.all_to_all(rows_ND.contiguous(), received, sent, group))
    # Rows arrive by rank; a grouped GEMM wants those of one expert next to each other.
    return rows_MD.index_select(0, _by_expert(counts[1]).to(rows_MD.device))


@torch.library.custom_op("trainyard::combine_rows", mutates_args=())
def combine_rows(rows_MD: Tensor, counts: Tensor, num_rows: int, group: str) -> Tensor:
    sent, received = counts.sum(2).tolist()
    by_rank = _by_expert(counts[1]).argsort().to(rows_MD.device)
    return compat.wait(compat.all_to_all(rows_MD.index_select(0, by_rank), sent, received, group))


def _by_expert(received: Tensor) -> Tensor:
    """The order in which rows that arrived by rank and then by expert are sorted by expert and then by rank."""
    size, experts = received.shape
    return torch.arange(experts).repeat(size).repeat_interleave(received.flatten()).argsort(stable=True)


@exchange_counts.register_fake
def _(count_E: Tensor, size: int, group: str) -> Tensor:
    return torch.empty((2, size, count_E.shape[0] // size), dtype=torch.int64, device="cpu")


@dispatch_rows.register_fake
def _(rows_ND: Tensor, counts: Tensor, group: str) -> Tensor:
    # How many rows arrive depends on the router. A compiler gets a size without a value, a plan an equal share.
    return rows_ND.new_empty(compat.unknown_size(rows_ND.shape[0]), rows_ND.shape[1])


@combine_rows.register_fake
def _(rows_MD: Tensor, counts: Tensor, num_rows: int, group: str) -> Tensor:
    return rows_MD.new_empty(num_rows, rows_MD.shape[1])


def _setup_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows_ND, counts, ctx.group = inputs
    ctx.num_rows = rows_ND.shape[0]
    ctx.save_for_backward(counts)


def _backward_dispatch(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
    return combine_rows(grad_MD, *ctx.saved_tensors, ctx.num_rows, ctx.group), None, None


def _setup_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, counts, _, ctx.group = inputs
    ctx.save_for_backward(counts)


def _backward_combine(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
    return dispatch_rows(grad_ND, *ctx.saved_tensors, ctx.group), None, None, None


dispatch_rows.register_autograd(_backward_dispatch, setup_context=_setup_dispatch)
combine_rows.register_autograd(_backward_combine, setup_context=_setup_combine)


class _ExchangeSlots(torch.autograd.Function):
    """An all-to-all of equal parts. Its backward pass is the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_to_all(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.all_to_all(grads[0]), None
