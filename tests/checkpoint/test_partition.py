"""Whatever the layout, the files of all ranks together hold every element of the model exactly once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import configs
from trainyard import models
from trainyard.checkpoint.formats.tensor_map import shapes
from trainyard.checkpoint.native.partition import boxes, written
from trainyard.config.schema import Config
from trainyard.parallel.layout import Layout


def layouts() -> st.SearchStrategy[tuple[Config, int]]:
    def make(family: str, tp: int, pp: int, vpp: int, cp: int, dp: int, tied: bool, odd: bool) -> tuple[Config, int]:
        model = {**configs.FAMILIES[family], "layers": 5}
        if family != "bert":
            model |= {"tied": tied, "vocab": 253 if odd else 260}
        vpp = vpp if pp > 1 else 1
        layout = {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp}
        return configs.config(model, layout=layout, train={"global_batch": 24, "micro_batch": 1}), tp * pp * cp * dp

    families = st.sampled_from(sorted(configs.FAMILIES))
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
    blueprint = models.family(config.model).blueprint(config.model)
    layout = Layout.of(config, world)
    counts = {part: np.zeros(shape, dtype=int) for part, shape in shapes(blueprint).items()}
    for rank in range(world):
        for box in written(blueprint, layout, rank):
            assert box.shape == counts[box.part].shape
            where = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
            counts[box.part][where] += 1
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize("family", sorted(configs.FAMILIES))
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_boxes_say_where_values_lie_in_a_rank_s_memory(family: str, tp: int) -> None:
    """Against the values themselves: a rank's share of initial weights, cut in rows, put together again."""
    from trainyard.models.init import initial

    section = configs.config(family).model
    blueprint = models.family(section).blueprint(section)
    whole: dict[str, np.ndarray] = {part: np.full(shape, np.nan) for part, shape in shapes(blueprint).items()}
    for rank in range(tp):
        values = initial(blueprint, 3, tp=tp, rank=rank)
        for name in blueprint.names():
            mine = values(name).numpy()
            for start in range(0, len(mine), 7):
                rows = range(start, min(start + 7, len(mine)))
                for box in boxes(blueprint, name, tp, rank, rows, once=False):
                    here = tuple(slice(at, at + size) for at, size in zip(box.at, box.sizes, strict=True))
                    there = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
                    whole[box.part][there] = mine[rows.start : rows.stop][here]
    one = initial(blueprint, 3)
    for name in blueprint.names():
        parts = [whole[piece.name] for piece in blueprint.slices(name)]
        np.testing.assert_array_equal(np.concatenate(parts), one(name).numpy())
