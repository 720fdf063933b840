"""Layouts ranked: whatever is proposed can be pasted, is valid, fits, and takes as long as was said."""

import pytest

from trainyard.config.load import load
from trainyard.parallel.layout import Layout
from trainyard.plan.hardware.spec import hardware
from trainyard.plan.memory.peak import memory
from trainyard.plan.report import changed
from trainyard.plan.search import search
from trainyard.plan.time.step_time import efficiency, step


@pytest.mark.parametrize(
    ("recipe", "word"),
    [
        ("deepseek-coder-33b", "trn1.32xlarge:4"),
        ("deepseek-coder-33b", "trn2.48xlarge:2"),
        ("bert-large-phase1", "h200:8"),
    ],
)
def test_what_is_proposed_holds(recipe: str, word: str) -> None:
    file, on = load(recipe), hardware(word)
    ranked = search(file, on, 4)
    assert len(ranked.found) >= 2
    assert [each.seconds for each in ranked.found] == sorted(each.seconds for each in ranked.found)
    for each in ranked.found:
        config = changed(file, each.words(file))  # as a user would paste them
        layout = Layout.of(config, on.ranks)
        assert config.layout.model_dump() == each.config.layout.model_dump()
        assert step(config, layout, on, efficiency(on)).seconds == pytest.approx(each.seconds)
        assert all(memory(config, layout, pp, on.entry.kind).total <= on.memory for pp in range(layout.pp))
        assert config.train.global_batch == file.train.global_batch


def test_the_file_is_found_among_the_others_even_where_it_does_not_fit() -> None:
    file, on = load("deepseek-coder-33b", ["layout.pp=2"]), hardware("trn1.32xlarge:4")
    ranked = search(file, on, 2)
    assert ranked.own
    assert ranked.own.memory > on.memory
    assert not any(each.own for each in ranked.found)


def test_groups_that_the_runtime_refuses_are_not_proposed() -> None:
    ranked = search(load("llama2-7b"), hardware("trn2.48xlarge:2"), 30)
    assert ranked.found
    assert all(each.layout.tp != 8 for each in ranked.found)
