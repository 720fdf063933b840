"""The table of hardware, words that name it, and files that add to it."""

from dataclasses import fields
from pathlib import Path

import pytest

from trainyard.config.load import load
from trainyard.config.recipes import recipe_names
from trainyard.core.errors import UserError
from trainyard.plan.hardware.catalog import CATALOG, CatalogEntry
from trainyard.plan.hardware.microbenchmark import measure_cpu
from trainyard.plan.hardware.spec import needed_hardware, parse_hardware, read_catalog


@pytest.mark.parametrize(
    ("word", "ranks", "node", "gib"),
    [
        ("trn1.32xlarge:16", 512, 32, 16),
        ("trn2.48xlarge:8", 512, 64, 24),
        ("trn2.48xlarge:8:lnc1", 1024, 128, 12),
        ("trn1.2xlarge", 2, 2, 16),
        ("trn3.gen2:1", 576, 576, 36),
        ("h200:8", 8, 8, 139),
        ("h100:16", 16, 8, 79),
        ("h200:1", 1, 1, 139),
    ],
)
def test_a_word_names_ranks_and_memory(word: str, ranks: int, node: int, gib: int) -> None:
    found = parse_hardware(word)
    assert (found.ranks, found.ranks_per_node, found.memory // 2**30) == (ranks, node, gib)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("h2oo:8", "nearest: h200"),
        ("h200:0", "NAME:COUNT"),
        ("h200:many", "NAME:COUNT"),
        ("trn2.48xlarge:1:lnc4", "LNC 2 or 1"),
        ("", "not known"),
    ],
)
def test_a_wrong_word_is_answered_in_one_line(word: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        parse_hardware(word)
    assert "\n" not in str(error.value)


def test_every_number_has_a_source() -> None:
    for entry in CATALOG.values():
        assert entry.sources["all"]
        assert entry.sources["link_latency"] == entry.sources["network_latency"] == "guess"
        assert (entry.price_per_hour is None) == (entry.sources["price_per_hour"] == "none found")
        assert set(entry.sources) <= {"all", *(field.name for field in fields(CatalogEntry))}


@pytest.mark.parametrize("recipe", recipe_names())
def test_recipes_name_hardware_with_as_many_ranks(recipe: str) -> None:
    config = load(recipe)
    word = needed_hardware(config)
    if not word.startswith("cpu"):
        assert parse_hardware(word).ranks == config.layout.ranks


def test_a_file_adds_and_changes_entries(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("ours: {like: h200, price_per_hour: 12.5, network_bandwidth: 50000000000}\nh100: {price_per_hour: 1}\n")
    table = read_catalog(path)
    assert table["ours"].price_per_hour == 12.5
    assert table["ours"].bf16_flops == CATALOG["h200"].bf16_flops
    assert table["ours"].sources["price_per_hour"] == str(path)
    assert table["h100"].price_per_hour == 1
    assert CATALOG["h100"].price_per_hour != 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ours: {like: h300}", "like=h300"),
        ("ours: {price_per_hour: 3}", "like=ours"),
        ("h200: {price: 3}", "nearest: price_per_hour"),
        ("h200: {price_per_hour: cheap}", "price_per_hour=cheap"),
        ("- h200", "mapping"),
        ("h200: {", "cannot be read"),
    ],
)
def test_a_wrong_file_is_answered_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as error:
        read_catalog(path)
    assert "\n" not in str(error.value)


def test_this_cpu_is_measured_and_shared_by_its_ranks() -> None:
    entry = measure_cpu(2)
    on = parse_hardware("cpu:2", measure=lambda ranks: entry)
    assert (on.ranks, on.ranks_per_node) == (2, 2)
    assert on.peak_flops("fp32") == pytest.approx(entry.fp32_flops / 2)
    assert entry.fp32_flops > 1e8
    assert entry.memory_bandwidth > 1e7
    assert on.link_bandwidth == pytest.approx(entry.network_bandwidth)
    assert 0 < entry.link_latency < 1
    assert set(entry.sources.values()) <= {"measured now", "guess", "none found"}
