"""Flat buffers and their shards: scatter and gather lose nothing, for any shapes and any number of ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from trainyard.parallel.flat_buffer import FlatBuffer

shapes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes, st.integers(1, 7), st.integers(1, 300), st.data())
@examples(100)
def test_gather_is_the_inverse_of_scatter(
    shape_list: list[tuple[int, ...]], num_shards: int, bucket_elements: int, data: st.DataObject
) -> None:
    named = {f"p{index}": shape for index, shape in enumerate(shape_list)}
    num_decayed = data.draw(st.integers(0, len(named)))
    decayed = set(list(named)[:num_decayed])
    flat = FlatBuffer(list(named.items()), num_decayed, num_shards, bucket_elements)
    buffer = torch.arange(1.0, flat.size + 1)
    gathered = torch.zeros(flat.size)
    shard_buffers = [torch.zeros(flat.shard_size) for _ in range(num_shards)]
    for bucket in flat.buckets:
        shards = torch.zeros(num_shards, bucket.shard_range.stop - bucket.shard_range.start)
        flat.scatter_to_shards(bucket, buffer, shards)
        for shard in range(num_shards):
            shard_buffers[shard][bucket.shard_range] = shards[shard]
        flat.gather_from_shards(bucket, shards, gathered)
        assert len({span.name in decayed for span in bucket.spans}) == 1  # no bucket mixes decayed and other parameters
    for name, shape in named.items():
        assert torch.equal(flat.view(gathered, name), flat.view(buffer, name))
        full = torch.cat([flat.shard_view(shard_buffers[shard], name, shard) for shard in range(num_shards)])
        assert torch.equal(full, flat.view(buffer, name))
        assert full.shape == shape
        assert (flat.spans[name].shard_start < flat.shard_decay_end) == (name in decayed)


@given(shapes, st.integers(1, 5))
@examples(100)
def test_a_single_shard_equals_the_full_buffer(shape_list: list[tuple[int, ...]], bucket_elements: int) -> None:
    named = [(f"p{index}", shape) for index, shape in enumerate(shape_list)]
    flat = FlatBuffer(named, len(named), 1, bucket_elements)
    assert (flat.size, flat.shard_decay_end) == (flat.shard_size, flat.shard_size)
    buffer = torch.arange(float(flat.size))
    for name in flat.spans:
        assert torch.equal(flat.view(buffer, name), flat.shard_view(buffer, name, 0))
