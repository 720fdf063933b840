"""TorchNeuron without a chip: requirements, launch variables, cores, and properties of the device."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainyard import devices
from trainyard.config.load import load
from trainyard.core.errors import UserError
from trainyard.core.world import World
from trainyard.devices.neuron.device import NeuronDevice, missing_requirement
from trainyard.devices.neuron.environment import (
    merge_env,
    native_environment,
    resolve_lnc,
    visible_core,
)
from trainyard.devices.neuron.topology import TrainiumInstance, detect_instance, installed_version, parse_generation

TRN2 = TrainiumInstance("trn2", 16, "trn2.48xlarge")


@pytest.mark.parametrize(
    ("instance", "package", "message"),
    [
        (TRN2, (2, 13), None),
        (TrainiumInstance("trn3", 4, ""), (2, 14), None),
        (TRN2, None, r"needs torch-neuronx 2\.13\.\* or 2\.14\.\* from AWS.s package index .Python 3\.12"),
        (TRN2, (2, 9), r"torch-neuronx 2\.9 is the older package for XLA; needs"),
        (TrainiumInstance(None, 0, "Standard PC"), (2, 13), r"no chip on this machine \(/dev/neuron0 is missing\)"),
        (TrainiumInstance("trn1", 16, "trn1.32xlarge"), None, r"this is a trn1.*nearest: device\.name=xla"),
        (TrainiumInstance(None, 16, ""), (2, 13), r"set NEURON_PLATFORM_TARGET_OVERRIDE=trn2 or trn3"),
    ],
)
def test_missing_requirement(instance: TrainiumInstance, package: tuple[int, int] | None, message: str | None) -> None:
    reason = missing_requirement(instance, package)
    if message is None:
        assert reason is None
    else:
        assert reason is not None
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(reason)


def test_selecting_it_by_name_says_what_to_install() -> None:
    with pytest.raises(
        UserError, match=r"device\.name=neuron: needs torch-neuronx 2\.13.*; available: .*cpu, auto"
    ) as error:
        devices.select("neuron")
    assert "\n" not in str(error.value)


def test_instance_is_detected_from_dmi_and_device_files(tmp_path: Path) -> None:
    dmi = tmp_path / "sys/devices/virtual/dmi/id"
    dmi.mkdir(parents=True)
    (dmi / "product_name").write_text("trn2u.48xlarge\n")
    (tmp_path / "dev").mkdir()
    for name in ("neuron0", "neuron1", "neuron15", "neuron", "neuron_shared", "null"):
        (tmp_path / "dev" / name).touch()
    assert detect_instance(tmp_path, {}) == TrainiumInstance("trn2", 3, "trn2u.48xlarge")
    assert detect_instance(tmp_path, {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3"}).generation == "trn3"
    assert detect_instance(tmp_path / "nothing", {}) == TrainiumInstance(None, 0, "")


@pytest.mark.parametrize(
    ("product", "generation"),
    [("trn1.2xlarge", "trn1"), ("trn1n.32xlarge", "trn1"), ("p5.48xlarge", None), ("Trn3pd98.3xlarge", "trn3")],
)
def test_parse_generation(product: str, generation: str | None) -> None:
    assert parse_generation(product) == generation


def test_installed_version() -> None:
    assert installed_version("torch-neuronx") is None
    reason = installed_version("torch")
    assert reason is not None
    assert reason >= (2, 11)


@pytest.mark.parametrize(("ranks", "local", "hosts"), [(1, 1, 1), (64, 64, 1), (128, 64, 2), (65, 64, 2)])
def test_hosts(ranks: int, local: int, hosts: int) -> None:
    assert World(size=ranks, local_size=local).hosts == hosts


@pytest.mark.parametrize(
    ("generation", "requested", "environ", "lnc"),
    [
        ("trn1", None, {}, 1),
        ("trn2", None, {}, 2),
        ("trn2", None, {"NEURON_LOGICAL_NC_CONFIG": "1"}, 1),
        ("trn2", 1, {}, 1),
        ("trn3", 2, {"NEURON_LOGICAL_NC_CONFIG": "2"}, 2),
    ],
)
def test_lnc(generation: str, requested: int | None, environ: dict[str, str], lnc: int) -> None:
    assert resolve_lnc(generation, requested, environ) == lnc


@pytest.mark.parametrize(
    ("generation", "requested", "environ", "message"),
    [
        ("trn2", 2, {"NEURON_LOGICAL_NC_CONFIG": "1"}, r"NEURON_LOGICAL_NC_CONFIG=1: conflicts with device\.lnc=2"),
        ("trn1", 2, {}, "trn1 with LNC 2: not supported; supported: trn1 with LNC 1, trn2 with LNC 1"),
        ("trn2", None, {"NEURON_LOGICAL_NC_CONFIG": "two"}, "NEURON_LOGICAL_NC_CONFIG=two: must be a number"),
    ],
)
def test_invalid_lnc(generation: str, requested: int | None, environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_lnc(generation, requested, environ)


@pytest.mark.parametrize(
    ("visible", "local_rank", "local_ranks", "core"),
    [
        (None, 5, 64, "5"),
        ("", 5, 64, "5"),
        ("7", 3, 4, "7"),  # the user's launcher assigned this rank its core
        ("4-7", 2, 4, "6"),
        ("8,10,12", 1, 2, "10"),
        ("0-1,8-9", 3, 4, "9"),
    ],
)
def test_visible_core(visible: str | None, local_rank: int, local_ranks: int, core: str) -> None:
    assert visible_core(visible, local_rank, local_ranks) == core


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ("0-1", "0-1: 2 cores for 4 ranks; each needs one"),
        ("all", "not a list of cores"),
        ("3-1", "not a list of cores"),
    ],
)
def test_invalid_visible_cores(visible: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        visible_core(visible, 0, 4)


@given(first=st.integers(0, 100), count=st.integers(2, 64))
def test_ranks_divide_the_visible_cores(first: int, count: int) -> None:
    visible = f"{first}-{first + count - 1}"
    cores = [int(visible_core(visible, rank, count)) for rank in range(count)]
    assert cores == list(range(first, first + count))


def test_native_environment() -> None:
    one_host = native_environment(2, World(3, 4, 3, 4), "/cache")
    assert one_host["NEURON_LOGICAL_NC_CONFIG"] == "2"
    assert one_host["NEURON_RT_VISIBLE_CORES"] == "3"
    assert one_host["TORCH_NEURONX_NEFF_CACHE_DIR"] == "/cache"
    assert int(one_host["NEURON_RT_EXEC_TIMEOUT"]) > 30
    assert not [name for name in one_host if name.startswith("FI_")]
    two_hosts = native_environment(2, World(size=128, local_size=64), "/cache")
    assert two_hosts["FI_PROVIDER"] == "efa"
    assert two_hosts["FI_EFA_USE_DEVICE_RDMA"] == "1"
    assert "NEURON_RT_ROOT_COMM_ID" not in two_hosts, "ranks find the root address through their store"


def test_user_settings_win() -> None:
    defaults = native_environment(2, World(), "/ours")
    user_env = {"TORCH_NEURONX_NEFF_CACHE_DIR": "/mine", "NEURON_RT_EXEC_TIMEOUT": "99"}
    changes = merge_env(defaults, user_env)
    assert not changes.keys() & user_env.keys()
    assert (user_env | changes).keys() == defaults.keys()


def test_device_properties() -> None:
    device = NeuronDevice(TRN2)
    assert device.max_local_ranks() == 64
    assert device.describe() == "trn2.48xlarge, a core of 24 GiB (LNC 2)"
    peak, slow = device.peak_throughput(torch.bfloat16), device.peak_throughput(torch.float32)
    assert peak is not None
    assert slow is not None
    assert peak.flops == pytest.approx(166.75e12)
    assert slow.flops == pytest.approx(45.25e12)
    assert device.supports_group(range(4))
    assert not device.supports_group(range(8))
    assert device.init_device.type == "cpu", "initial weights need exact 64-bit integers"
    assert device.rank_order(4, 64) is None
    assert device.rank_order(32, 64) == [*range(16), *range(48, 64), *range(16, 48)]


def test_prepare_rejects_invalid_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    device = NeuronDevice(TrainiumInstance("trn2", 1, "trn2.3xlarge"))
    with pytest.raises(UserError, match="local rank 4: this machine has 4 cores, one per rank"):
        device.prepare(False, World(4, 8, 4, 8), "bf16")
    with pytest.raises(UserError, match=r"precision\.kind=fp8: not on Trainium.*nearest: bf16"):
        device.prepare(False, World(), "fp8")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    with pytest.raises(UserError, match=r"conflicts with device\.lnc=2"):
        device.prepare(False, World(), "bf16", 2)


@pytest.mark.parametrize("value", [0, 3])
def test_lnc_out_of_range_is_an_error(value: int) -> None:
    with pytest.raises(UserError, match=rf"device\.lnc={value}.*nearest: {max(1, min(value, 2))}"):
        load("tiny-llama", [f"device.lnc={value}"])
