"""Groups emulated inside larger groups."""

import torch

from trainyard.parallel.process_group import Group, NestedGroup


class InMemoryGroup(Group):
    """A group whose all-reduce sums over lists that the test fills."""

    inputs: list[torch.Tensor]
    total: torch.Tensor

    def all_reduce_sum(self, x: torch.Tensor) -> torch.Tensor:
        InMemoryGroup.inputs.append(x)
        return InMemoryGroup.total


def test_each_nested_group_gets_the_sum_of_its_own_ranks() -> None:
    """Six ranks in two groups of three, with one all-reduce over all six."""
    values = [torch.randn(2, 3) for _ in range(6)]
    parents = [InMemoryGroup(tuple(range(6)), rank) for rank in range(6)]
    groups = [NestedGroup.contiguous(parent, 3, torch.device("cpu")) for parent in parents]
    InMemoryGroup.inputs, InMemoryGroup.total = [], torch.zeros(2, 6)
    for group, value in zip(groups, values, strict=True):
        group.all_reduce_sum(value)
    InMemoryGroup.total = torch.stack(InMemoryGroup.inputs).sum(0)
    for rank, (group, value) in enumerate(zip(groups, values, strict=True)):
        start = rank // 3 * 3
        assert torch.allclose(group.all_reduce_sum(value), torch.stack(values[start : start + 3]).sum(0))
        assert group.ranks == tuple(range(start, start + 3))
