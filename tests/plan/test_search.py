"""Layouts ranked: whatever is proposed can be pasted, is valid, fits, and takes as long as was said."""

import pytest

from trainyard.config.load import load
from trainyard.parallel.layout import Layout
from trainyard.plan.hardware.spec import parse_hardware
from trainyard.plan.memory.peak import estimate_memory
from trainyard.plan.report import with_overrides
from trainyard.plan.search import search_layouts
from trainyard.plan.time.efficiency import fitted_efficiency
from trainyard.plan.time.step_time import predict_step


@pytest.mark.parametrize(
    ("recipe", "word"),
    [
        ("deepseek-coder-33b", "trn1.32xlarge:4"),
        ("deepseek-coder-33b", "trn2.48xlarge:2"),
        ("bert-large-phase1", "h200:8"),
    ],
)
def test_what_is_proposed_holds(recipe: str, word: str) -> None:
    file, on = load(recipe), parse_hardware(word)
    ranked = search_layouts(file, on, 4)
    assert len(ranked.layouts) >= 2
    assert [each.seconds for each in ranked.layouts] == sorted(each.seconds for each in ranked.layouts)
    for each in ranked.layouts:
        config = with_overrides(file, each.overrides(file))  # as a user would paste them
        layout = Layout.from_config(config, on.ranks)
        assert config.layout.model_dump() == each.config.layout.model_dump()
        assert predict_step(config, layout, on, fitted_efficiency(on)).seconds == pytest.approx(each.seconds)
        assert all(estimate_memory(config, layout, pp, on.entry.kind).total <= on.memory for pp in range(layout.pp))
        assert config.train.global_batch == file.train.global_batch


def test_the_file_is_found_among_the_others_even_where_it_does_not_fit() -> None:
    file, on = load("deepseek-coder-33b", ["layout.pp=2"]), parse_hardware("trn1.32xlarge:4")
    ranked = search_layouts(file, on, 2)
    assert ranked.file_layout
    assert ranked.file_layout.memory > on.memory
    assert not any(each.is_file for each in ranked.layouts)


def test_groups_that_the_runtime_refuses_are_not_proposed() -> None:
    ranked = search_layouts(load("llama2-7b"), parse_hardware("trn2.48xlarge:2"), 30)
    assert ranked.layouts
    assert all(each.layout.tp != 8 for each in ranked.layouts)
