"""Flat memory and its shards: dealt out and collected, nothing is lost, whatever the shapes and the rank count."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainyard.parallel.flat_buffer import FlatBuffer

shapes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes, st.integers(1, 7), st.integers(1, 300), st.data())
def test_what_is_dealt_is_collected(
    found: list[tuple[int, ...]], shards: int, bucket: int, data: st.DataObject
) -> None:
    named = [(f"p{number}", shape) for number, shape in enumerate(found)]
    split = data.draw(st.integers(0, len(named)))
    flat = FlatBuffer(named, split, shards, bucket)
    row = torch.arange(1.0, flat.size + 1)
    back = torch.zeros(flat.size)
    rows = [torch.zeros(flat.shard_size) for _ in range(shards)]
    for each in flat.buckets:
        dealt = torch.zeros(shards, each.shard_range.stop - each.shard_range.start)
        flat.scatter_to_shards(each, row, dealt)
        for shard in range(shards):
            rows[shard][each.shard_range] = dealt[shard]
        flat.gather_from_shards(each, dealt, back)
        # one side of the split alone
        assert (
            len({number < split for number, (name, _) in enumerate(named) if name in {s.name for s in each.spans}}) == 1
        )
    for name, shape in named:
        assert torch.equal(flat.view(back, name), flat.view(row, name))
        whole = torch.cat([flat.shard_view(rows[shard], name, shard) for shard in range(shards)])
        assert torch.equal(whole, flat.view(row, name))
        assert whole.shape == shape
    decayed = [flat.spans[name].shard_start for name, _ in named[:split]]
    assert all(at < flat.shard_decay_end for at in decayed)
    assert all(flat.spans[name].shard_start >= flat.shard_decay_end for name, _ in named[split:])


@given(shapes, st.integers(1, 5))
def test_one_shard_is_the_whole(found: list[tuple[int, ...]], bucket: int) -> None:
    flat = FlatBuffer([(f"p{number}", shape) for number, shape in enumerate(found)], len(found), 1, bucket)
    assert (flat.size, flat.shard_decay_end) == (flat.shard_size, flat.shard_size)
    row = torch.arange(float(flat.size))
    for name in flat.spans:
        assert torch.equal(flat.view(row, name), flat.shard_view(row, name, 0))
