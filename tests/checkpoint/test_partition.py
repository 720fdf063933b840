"""Whatever the layout, the files of all ranks together hold every element of the model exactly once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import configs
from trainyard import models
from trainyard.checkpoint.formats.tensor_map import blueprint_shapes
from trainyard.checkpoint.native.partition import owned_slices, rank_slices
from trainyard.config.schema import Config
from trainyard.parallel.layout import Layout


def layouts() -> st.SearchStrategy[tuple[Config, int]]:
    def make(family: str, tp: int, pp: int, vpp: int, cp: int, dp: int, tied: bool, odd: bool) -> tuple[Config, int]:
        model = {**configs.TINY_MODELS[family], "layers": 5}
        if family != "bert":
            model |= {"tie_embeddings": tied, "vocab": 253 if odd else 260}
        vpp = vpp if pp > 1 else 1
        layout = {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp}
        return configs.tiny_config(
            model, layout=layout, train={"global_batch": 24, "micro_batch": 1}
        ), tp * pp * cp * dp

    families = st.sampled_from(sorted(configs.TINY_MODELS))
    return st.builds(
        make,
        families,
        st.sampled_from([1, 2, 4]),
        st.integers(1, 2),
        st.integers(1, 2),
        st.integers(1, 2),
        st.sampled_from([1, 2, 3]),
        st.booleans(),
        st.booleans(),
    )


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_every_element_is_written_exactly_once(case: tuple[Config, int]) -> None:
    config, world = case
    blueprint = models.family_of(config.model).blueprint(config.model)
    layout = Layout.from_config(config, world)
    counts = {part: np.zeros(shape, dtype=int) for part, shape in blueprint_shapes(blueprint).items()}
    for rank in range(world):
        for box in owned_slices(blueprint, layout, rank):
            assert box.global_shape == counts[box.tensor_name].shape
            where = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
            counts[box.tensor_name][where] += 1
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize("family", sorted(configs.TINY_MODELS))
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_boxes_say_where_values_lie_in_a_rank_s_memory(family: str, tp: int) -> None:
    """Against the values themselves: a rank's share of initial weights, cut in rows, put together again."""
    from trainyard.models.init import initial_values

    section = configs.tiny_config(family).model
    blueprint = models.family_of(section).blueprint(section)
    whole: dict[str, np.ndarray] = {part: np.full(shape, np.nan) for part, shape in blueprint_shapes(blueprint).items()}
    for rank in range(tp):
        values = initial_values(blueprint, 3, tp=tp, rank=rank)
        for name in blueprint.parameter_names():
            mine = values(name).numpy()
            for start in range(0, len(mine), 7):
                rows = range(start, min(start + 7, len(mine)))
                for box in rank_slices(blueprint, name, tp, rank, rows, skip_replicas=False):
                    here = tuple(slice(at, at + size) for at, size in zip(box.local_offsets, box.sizes, strict=True))
                    there = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
                    whole[box.tensor_name][there] = mine[rows.start : rows.stop][here]
    one = initial_values(blueprint, 3)
    for name in blueprint.parameter_names():
        parts = [whole[piece.name] for piece in blueprint.tp_slices(name)]
        np.testing.assert_array_equal(np.concatenate(parts), one(name).numpy())
