"""Flat memory and its shards: dealt out and collected, nothing is lost, whatever the shapes and the rank count."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainyard.parallel.flat_buffer import Flat

shapes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes, st.integers(1, 7), st.integers(1, 300), st.data())
def test_what_is_dealt_is_collected(
    found: list[tuple[int, ...]], shards: int, bucket: int, data: st.DataObject
) -> None:
    named = [(f"p{number}", shape) for number, shape in enumerate(found)]
    split = data.draw(st.integers(0, len(named)))
    flat = Flat(named, split, shards, bucket)
    row = torch.arange(1.0, flat.size + 1)
    back = torch.zeros(flat.size)
    rows = [torch.zeros(flat.shard_size) for _ in range(shards)]
    for each in flat.buckets:
        dealt = torch.zeros(shards, each.shard.stop - each.shard.start)
        flat.deal(each, row, dealt)
        for shard in range(shards):
            rows[shard][each.shard] = dealt[shard]
        flat.collect(each, dealt, back)
        # one side of the split alone
        assert (
            len({number < split for number, (name, _) in enumerate(named) if name in {s.name for s in each.spans}}) == 1
        )
    for name, shape in named:
        assert torch.equal(flat.view(back, name), flat.view(row, name))
        whole = torch.cat([flat.shard(rows[shard], name, shard) for shard in range(shards)])
        assert torch.equal(whole, flat.view(row, name))
        assert whole.shape == shape
    decayed = [flat.spans[name].at for name, _ in named[:split]]
    assert all(at < flat.split for at in decayed)
    assert all(flat.spans[name].at >= flat.split for name, _ in named[split:])


@given(shapes, st.integers(1, 5))
def test_one_shard_is_the_whole(found: list[tuple[int, ...]], bucket: int) -> None:
    flat = Flat([(f"p{number}", shape) for number, shape in enumerate(found)], len(found), 1, bucket)
    assert (flat.size, flat.split) == (flat.shard_size, flat.shard_size)
    row = torch.arange(float(flat.size))
    for name in flat.spans:
        assert torch.equal(flat.view(row, name), flat.shard(row, name, 0))
