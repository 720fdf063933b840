"""Megatron's sample order against what megatron-core and the Megatron of 2023 themselves give."""

import hashlib
import json
from fractions import Fraction
from importlib.metadata import distribution
from importlib.util import module_from_spec, spec_from_file_location
from math import ceil
from pathlib import Path
from platform import machine
from typing import Any

import numpy as np
import pytest

from tests.support import configs
from tests.support.token_files import write_counting_documents
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.data.loading.build import build_datasets
from trainyard.data.loading.megatron_order import blend_indices, blend_sizes, split_documents

GOLDEN = json.loads((Path(__file__).parent / "megatron_golden.json").read_text())
ORDERS = ("megatron", "megatron-2023")


def case_config(directory: Path, case: dict[str, Any], order: str) -> Config:
    """Write the documents of a case and return a configuration that trains on them."""
    first = 0
    for number, (count, seed) in enumerate(case["documents"]):
        lengths = np.random.RandomState(seed).randint(1, case["longest"], count).tolist()
        write_counting_documents(directory / str(number), lengths, first)
        first += sum(lengths)
    data = {
        "source": "tokens",
        "paths": [str(directory / str(number)) for number in range(len(case["documents"]))],
        "order": order,
        **{key: case[key] for key in ("weights", "split", "seq_len")},
    }
    train = {"steps": case["samples"], "global_batch": 1, "micro_batch": 1, "seed": case["seed"]}
    return configs.tiny_config({**configs.LLAMA, "vocab": 1_000_000}, data=data, train=train)


def train_tokens(config: Config) -> np.ndarray:
    dataset, _, needs_shuffle = build_datasets(config)
    assert not needs_shuffle
    assert len(dataset) == config.train.steps
    return dataset.samples(np.arange(len(dataset)))["tokens"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_samples_are_those_of_megatron(tmp_path: Path, name: str, order: str) -> None:
    """Guards `data.order`: a run that replaces one of Megatron trains on the same samples in the same order."""
    case = GOLDEN["cases"][name]
    tokens = train_tokens(case_config(tmp_path, case, order))
    assert tokens[:40, 0].tolist() == case[order]["first_tokens"]
    assert hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest() == case[order]["sha256"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("split", GOLDEN["splits"]["megatron"])
def test_documents_of_a_split_are_those_of_megatron(split: str, order: str) -> None:
    """Guards the rounding of data.split for all document counts up to 3,999; one document more changes all samples."""
    golden = GOLDEN["splits"][order][split]
    ends = [[part.stop for part in split_documents(split, count, order)[:2]] for count in range(1, 4000)]
    assert ends[2499] == golden["2500"]
    assert hashlib.sha256(np.array(ends, "<i4").tobytes()).hexdigest() == golden["sha256"]


def test_versions_differ_where_megatron_changed() -> None:
    """2,500 documents at 969,30,1: megatron-core trains on 2,422 documents, the version of 2023 on 2,423."""
    assert [len(split_documents("969,30,1", 2500, order)[0]) for order in ORDERS] == [2422, 2423]


def rounded_once(weights: list[float], num_samples: int) -> list[int]:
    """Datasets of a blend where the product and the difference are one fused multiply-add."""
    shares = np.array(weights) / np.sum(weights)
    exact = [Fraction(share) for share in (shares / np.sum(shares)).tolist()]
    taken, chosen = [0] * len(weights), []
    for position in range(num_samples):
        deficits = [float(share * max(position, 1) - count) for share, count in zip(exact, taken, strict=True)]
        chosen.append(deficits.index(max(deficits)))
        taken[chosen[-1]] += 1
    return chosen


@pytest.mark.parametrize("blend", GOLDEN["blends"], ids=lambda blend: f"{len(blend['weights'])}")
@pytest.mark.parametrize("loop_up_to", [0, 100])
def test_blends_round_as_on_x86_64(blend: dict[str, Any], loop_up_to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order does not depend on the host: no fused multiply-add, which compilers for Arm give Megatron's helper."""
    monkeypatch.setattr("trainyard.data.loading.megatron_order.PYTHON_LOOP_DATASETS", loop_up_to)
    datasets, samples = blend_indices(tuple(blend["weights"]), 600, "megatron")
    assert datasets[:30].tolist() == blend["first"]
    assert hashlib.sha256(datasets.astype("<i2").tobytes()).hexdigest() == blend["sha256"]
    for number in range(len(blend["weights"])):
        assert samples[datasets == number].tolist() == list(range(int((datasets == number).sum())))
    fused, first = rounded_once(blend["weights"], 600), blend["fused_from"]
    assert fused[:first] == datasets[:first].tolist()
    assert fused[first] != datasets[first]  # these weights can tell


def test_the_guide_names_the_host_of_the_order() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "data.md").read_text()
    assert "on x86-64" in guide.partition("| `megatron-2023` |")[2].partition("**Blends.**")[0]


@pytest.mark.parametrize("case", GOLDEN["blend_sizes"], ids=lambda case: str(case["samples"]))
def test_samples_that_a_blend_prepares(case: dict[str, Any]) -> None:
    """Half a percent more of each dataset than the blend needs. The number decides how many epochs are shuffled."""
    weights, samples = tuple(case["weights"]), case["samples"]
    assert blend_sizes(weights, samples, "megatron") == case["sizes"]
    # get_datasets_weights_and_num_samples of Megatron-LM until 2023
    old = [ceil(samples * (weight / sum(weights)) * 1.005) for weight in weights]
    assert blend_sizes(weights, samples, "megatron-2023") == old


@pytest.mark.skipif(machine() != "x86_64", reason="the promise is the order on x86-64")
def test_random_blends_equal_the_helper_of_megatron_core() -> None:
    files = [file for file in distribution("megatron-core").files or () if file.stem.startswith("helpers_cpp")]
    spec = spec_from_file_location("helpers_cpp", files[0].locate())  # importing all of megatron.core takes 9 s
    assert spec
    assert spec.loader
    spec.loader.exec_module(helpers := module_from_spec(spec))
    rng = np.random.RandomState(0)
    for number in range(60):
        sets = int(rng.randint(2, 24))
        weights = rng.randint(1, 20, sets).astype(float) if number % 2 else rng.uniform(0.1, 10, sets).round(2)
        shares = weights / np.sum(weights)
        shares = shares / np.sum(shares)
        expected = np.zeros(400, np.int16), np.zeros(400, np.int64)
        helpers.build_blending_indices(*expected, shares, sets, 400, False)
        for actual, wanted in zip(blend_indices(tuple(weights.tolist()), 400, "megatron"), expected, strict=True):
            assert actual.tolist() == wanted.tolist(), weights


def test_more_than_256_datasets_blend() -> None:
    weights = tuple(float(number % 7 + 1) for number in range(300))
    dataset_indices, sample_indices = blend_indices(weights, 3000, "megatron")
    counts = np.bincount(dataset_indices, minlength=300)
    assert abs(counts - np.array(weights) / sum(weights) * 3000).max() < 2
    for number in (0, 255, 256, 299):
        assert sample_indices[dataset_indices == number].tolist() == list(range(counts[number]))


def test_too_many_datasets_are_refused(tmp_path: Path) -> None:
    write_counting_documents(tmp_path / "x", [50])
    case = {"documents": [], "longest": 2, "weights": [], "split": None, "seq_len": 8, "samples": 4, "seed": 0}
    config = case_config(tmp_path, case | {"documents": [[3, 1]]}, "megatron-2023").model_dump(mode="json")
    config["data"] |= {"paths": [str(tmp_path / "x")] * 255, "weights": [1.0] * 255}
    with pytest.raises(UserError, match=r"255 datasets; Megatron blends at most 254 with data\.order=megatron-2023"):
        build_datasets(parse(config))
    config["data"]["order"] = "megatron"
    assert len(build_datasets(parse(config)).train) == 4


@pytest.mark.parametrize("split", ["nan,1,1", "inf,1,1", "0,0,0", "-1,2", "1,1,1,1", "", "980;10"])
def test_invalid_splits_are_one_line(split: str) -> None:
    for order in (*ORDERS, "shuffled"):
        with pytest.raises(UserError, match=r"data\.split=.*nearest: 980,10,10"):
            split_documents(split, 100, order)


@pytest.mark.parametrize("order", ORDERS)
def test_seed_beyond_32_bits_is_refused(tmp_path: Path, order: str) -> None:
    """numpy's generator, which Megatron uses, has seeds of 32 bits; the other order takes any."""
    case = {"documents": [[9, 1]], "longest": 50, "weights": [], "split": "1,0,0", "seq_len": 8, "samples": 4}
    with pytest.raises(UserError, match=rf"train\.seed=4294967296: data\.order={order}.*nearest: 4294967295"):
        case_config(tmp_path, case | {"seed": 2**32}, order)
    assert len(train_tokens(case_config(tmp_path, case | {"seed": 2**32 - 1}, order))) == 4


@pytest.mark.nightly
@pytest.mark.skipif(machine() != "x86_64", reason="the promise is the order on x86-64")
def test_random_cases_equal_megatron_core(tmp_path: Path) -> None:
    """Cases drawn at random, built by megatron-core itself in the same test."""
    pytest.importorskip("megatron.core.datasets.helpers_cpp", reason="megatron-core has no wheel for this platform")
    from tests.support.megatron_core import core_samples

    rng = np.random.RandomState(0)
    for number in range(15):
        sets = int(rng.randint(1, 6))
        case = {
            "documents": [[int(rng.randint(100, 400)), number * 10 + index] for index in range(sets)],
            "longest": int(rng.randint(10, 80)),
            "weights": rng.uniform(0.1, 10, sets).round(2).tolist() if sets > 1 or number % 2 else [],
            "split": ("900,60,40", "100,0,0", "80,10,10")[number % 3],
            "seq_len": int(rng.randint(4, 40)),
            "samples": int(rng.randint(50, 900)),
            "seed": int(rng.randint(2**31)),
        }
        (directory := tmp_path / str(number)).mkdir()
        config = case_config(directory, case, "megatron")
        assert np.array_equal(train_tokens(config), core_samples(config, directory / "cache")), case
