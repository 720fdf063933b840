"""The hardware catalog, names of hardware, and files that extend the catalog."""

from dataclasses import fields
from pathlib import Path

import pytest

from trainyard.config.load import load
from trainyard.config.recipes import recipe_names
from trainyard.core.constants import GIB
from trainyard.core.errors import UserError
from trainyard.preflight.plan.hardware.catalog import CATALOG, CatalogEntry
from trainyard.preflight.plan.hardware.microbenchmark import measure_cpu
from trainyard.preflight.plan.hardware.spec import needed_hardware, parse_hardware, read_catalog


@pytest.mark.parametrize(
    ("name", "ranks", "ranks_per_node", "gib"),
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
def test_name_and_count_give_ranks_and_memory(name: str, ranks: int, ranks_per_node: int, gib: int) -> None:
    hardware = parse_hardware(name)
    assert (hardware.ranks, hardware.ranks_per_node, hardware.memory // GIB) == (ranks, ranks_per_node, gib)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("h2oo:8", "nearest: h200"),
        ("h200:0", "NAME:COUNT"),
        ("h200:many", "NAME:COUNT"),
        ("trn2.48xlarge:1:lnc4", "LNC 2 or 1"),
        ("", "unknown"),
        ("trn1.32xlarge:100000", "at most 131,072 ranks"),
        ("cpu:999999999", "at most 131,072 ranks"),
        ("h200:" + "9" * 5000, "NAME:COUNT"),
    ],
)
def test_wrong_name_is_a_one_line_error(name: str, error: str) -> None:
    with pytest.raises(UserError, match=error) as caught:
        parse_hardware(name)
    assert "\n" not in str(caught.value)


def test_every_number_has_a_source() -> None:
    for entry in CATALOG.values():
        assert entry.sources["all"]
        assert entry.sources["link_latency"] == entry.sources["network_latency"] == "guess"
        assert (entry.price_per_hour is None) == (entry.sources["price_per_hour"] == "none found")
        assert set(entry.sources) <= {"all", *(field.name for field in fields(CatalogEntry))}


@pytest.mark.parametrize(("name", "size"), [("trn1:4", "trn1.32xlarge"), ("trn2", "trn2.48xlarge")])
def test_a_family_of_instances_is_its_largest_one(name: str, size: str) -> None:
    assert parse_hardware(name).name == size


@pytest.mark.parametrize("recipe", recipe_names())
def test_hardware_of_recipes_has_their_number_of_ranks(recipe: str) -> None:
    config = load(recipe)
    name = needed_hardware(config.hardware, config.layout, config.device.lnc)
    if not name.startswith("cpu"):
        assert parse_hardware(name).ranks == config.layout.ranks


@pytest.mark.parametrize(
    ("hardware", "overrides", "expected"),
    [
        ("4 x trn1.32xlarge", [], (4, 128)),
        ("4 x trn1.32xlarge", ["layout.ranks=64"], (2, 64)),
        ("4 x trn1.32xlarge", ["layout.ranks=65"], (3, 96)),
        ("8 x trn2.48xlarge", ["layout.ranks=512", "device.lnc=1"], (4, 512)),
        ("16 x h100", ["layout.ranks=4"], (4, 4)),
    ],
)
def test_ranks_of_the_layout_set_the_size_of_the_hardware(
    hardware: str, overrides: list[str], expected: tuple[int, int]
) -> None:
    """`plan FILE layout.ranks=64` planned for the ranks of the file's hardware."""
    config = load("tiny-llama", overrides)
    found = parse_hardware(needed_hardware(hardware, config.layout, config.device.lnc))
    assert (found.count, found.ranks) == expected


def test_file_adds_and_changes_entries(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "mine: {like: h200, price_per_hour: 12.5, network_bandwidth: 50000000000}\nh100: {price_per_hour: 1}\n"
    )
    catalog = read_catalog(path)
    assert catalog["mine"].price_per_hour == 12.5
    assert catalog["mine"].bf16_flops == CATALOG["h200"].bf16_flops
    assert catalog["mine"].sources["price_per_hour"] == str(path)
    assert catalog["h100"].price_per_hour == 1
    assert CATALOG["h100"].price_per_hour != 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("mine: {like: h300}", "like=h300"),
        ("mine: {price_per_hour: 3}", "like=mine"),
        ("h200: {price: 3}", "nearest: price_per_hour"),
        ("h200: {price_per_hour: cheap}", "price_per_hour=cheap"),
        ("- h200", "mapping"),
        ("h200: {", "cannot be read"),
    ],
)
def test_wrong_file_is_a_one_line_error(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=error) as caught:
        read_catalog(path)
    assert "\n" not in str(caught.value)


def test_this_cpu_is_measured_and_divided_among_its_ranks() -> None:
    entry = measure_cpu(2)
    hardware = parse_hardware("cpu:2", measure=lambda ranks: entry)
    assert (hardware.ranks, hardware.ranks_per_node) == (2, 2)
    assert hardware.peak_flops("fp32") == pytest.approx(entry.fp32_flops / 2)
    assert entry.fp32_flops > 1e8
    assert entry.memory_bandwidth > 1e7
    assert hardware.link_bandwidth == pytest.approx(entry.network_bandwidth)
    assert 0 < entry.link_latency < 1
    assert set(entry.sources.values()) <= {"measured now", "guess", "none found"}
