"""At every layout, the files of all ranks together hold every element of the model exactly once."""

from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import configs
from tests.support.examples import examples
from tests.support.two_kinds import TWO_KINDS
from trainyard import models
from trainyard.checkpoint.partition import owned_slices, rank_slices
from trainyard.checkpoint.weights import unfused_tensors
from trainyard.config.schema import Config
from trainyard.core.splits import ModelShard
from trainyard.models.init import initial_values
from trainyard.parallel.layout import Layout

MODELS = {**configs.TINY_MODELS, "moe": configs.MOE, "two_kinds": TWO_KINDS}


def layouts() -> st.SearchStrategy[tuple[Config, int]]:
    def make(
        family: str, tp: int, pp: int, vpp: int, cp: int, dp: int, ep: int, tied: bool, odd: bool
    ) -> tuple[Config, int]:
        model = {**MODELS[family], "layers": 5}
        if family != "bert":
            model |= {"tie_embeddings": tied, "vocab": 253 if odd else 260}
        vpp = vpp if pp > 1 else 1
        layout = {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": gcd(ep, dp * cp) if "experts" in model else 1}
        return configs.tiny_config(
            model, layout=layout, train={"global_batch": 24, "micro_batch": 1}
        ), tp * pp * cp * dp

    families = st.sampled_from(sorted(MODELS))
    return st.builds(
        make,
        families,
        st.sampled_from([1, 2, 4]),
        st.integers(1, 2),
        st.integers(1, 2),
        st.integers(1, 2),
        st.sampled_from([1, 2, 3]),
        st.sampled_from([1, 2, 4]),
        st.booleans(),
        st.booleans(),
    )


@examples(60)
@given(layouts())
def test_every_element_is_written_exactly_once(case: tuple[Config, int]) -> None:
    config, world_size = case
    blueprint = models.family_of(config.model).blueprint(config.model)
    layout = Layout.from_config(config, world_size)
    tensors = unfused_tensors(config.model)
    counts = {name: np.zeros(tensor.sizes, dtype=int) for name, tensor in tensors.items()}
    for rank in range(world_size):
        for piece in owned_slices(blueprint, layout, rank):
            assert piece.global_shape == tensors[piece.name].sizes
            counts[piece.name][piece.to_index()] += 1
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize("family", sorted(configs.TINY_MODELS))
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_rank_slices_locate_values_in_local_memory(family: str, tp: int) -> None:
    """The initial weights of all ranks, cut into ranges of rows and reassembled, are those of a single rank."""
    model = configs.tiny_config(family).model
    blueprint = models.family_of(model).blueprint(model)
    full = {name: np.full(tensor.sizes, np.nan) for name, tensor in unfused_tensors(model).items()}
    for rank in range(tp):
        values = initial_values(blueprint, 3, shard=ModelShard(tp, rank))
        for name in blueprint.parameter_names():
            local = values(name).numpy()
            for start in range(0, len(local), 7):
                rows = range(start, min(start + 7, len(local)))
                for piece in rank_slices(blueprint, name, ModelShard(tp, rank), rows, skip_replicas=False):
                    full[piece.name][piece.to_index()] = local[rows.start : rows.stop][piece.local_index]
    single_rank = initial_values(blueprint, 3)
    for name in blueprint.parameter_names():
        tensors = [full[piece.name] for piece in blueprint.local_slices(name)]
        np.testing.assert_array_equal(np.concatenate(tensors), single_rank(name).numpy())
