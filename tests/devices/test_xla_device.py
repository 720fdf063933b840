"""The XLA device without a trn1 and without torch_xla: decisions that need neither."""

import pytest
import torch

from trainyard import devices
from trainyard.core.errors import UserError
from trainyard.core.world import World
from trainyard.devices.neuron.environment import (
    PRECISION_FLAGS,
    compiler_flags,
    merge_env,
    root_comm_id,
    xla_environment,
)
from trainyard.devices.neuron.topology import TrainiumInstance
from trainyard.devices.neuron.xla_device import XlaDevice, missing_requirement

TRN1 = TrainiumInstance("trn1", 16, "trn1.32xlarge")
NOWHERE = TrainiumInstance(None, 0, "")


@pytest.mark.parametrize(
    ("instance", "installed", "pjrt", "message"),
    [
        (TRN1, True, None, None),
        (NOWHERE, True, "CPU", None),
        (TRN1, False, None, "needs torch 2.9 with torch_xla 2.9"),
        (NOWHERE, True, None, "no Trainium on this machine; PJRT_DEVICE selects"),
    ],
)
def test_missing_requirement(
    instance: TrainiumInstance, installed: bool, pjrt: str | None, message: str | None
) -> None:
    reason = missing_requirement(instance, installed, pjrt)
    assert reason is None if message is None else message in str(reason)


def test_selecting_it_by_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainyard.devices.neuron.xla_device.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"device\.name=xla: needs torch 2\.9 with torch_xla 2\.9.*; available: .*cpu, auto"
    ):
        devices.select("xla")


@pytest.mark.parametrize("precision", PRECISION_FLAGS)
def test_dtypes_are_not_changed(precision: str) -> None:
    """Neither the compiler nor torch_xla downcasts fp32 tensors, and the hardware does not round stochastically."""
    variables = xla_environment("trn1", 1, precision, World(), "/cache")
    assert variables["XLA_USE_BF16"] == variables["XLA_DOWNCAST_BF16"] == "0"
    assert variables["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "0"
    flags = variables["NEURON_CC_FLAGS"].split()
    assert "--auto-cast=none" in flags
    assert "--model-type=transformer" in flags
    assert ("--enable-mixed-precision-accumulation" in flags) == (precision != "fp32")


@pytest.mark.parametrize(
    ("generation", "lnc", "expected_flag", "unexpected_flag"),
    [
        ("trn1", 1, "--enable-saturate-infinity", "--lnc"),
        ("trn2", 2, "--lnc=2", "--enable-saturate-infinity"),
        ("trn2", 1, "--lnc=1", "--enable-saturate-infinity"),
    ],
)
def test_compiler_flags_by_generation(generation: str, lnc: int, expected_flag: str, unexpected_flag: str) -> None:
    flags = compiler_flags(generation, lnc, "bf16")
    assert expected_flag in flags
    assert not any(flag.startswith(unexpected_flag) for flag in flags)


def test_xla_environment() -> None:
    world = World(33, 64, 1, 32, "10.0.0.1", 41000)
    variables = xla_environment("trn1", 1, "bf16", world, "/cache")
    assert variables["PJRT_DEVICE"] == "NEURON"
    assert variables["NEURON_PJRT_WORLD_SIZE"] == "64"
    assert variables["NEURON_PJRT_PROCESS_INDEX"] == "33"
    assert variables["PJRT_LOCAL_PROCESS_COUNT"] == "32"
    assert variables["PJRT_LOCAL_PROCESS_RANK"] == variables["NEURON_RT_VISIBLE_CORES"] == "1"
    assert variables["NEURON_RT_ROOT_COMM_ID"] == "10.0.0.1:41001"
    assert variables["FI_PROVIDER"] == "efa"
    assert variables["NEURON_COMPILE_CACHE_URL"] == "/cache"
    single = xla_environment("trn1", 1, "bf16", World(), "/cache")
    assert not single.keys() & {"NEURON_RT_ROOT_COMM_ID", "FI_PROVIDER", "NEURON_LOGICAL_NC_CONFIG"}


@pytest.mark.parametrize(
    ("master", "address"), [("host", "host:7001"), ("fe80::1:2", "[fe80::1:2]:7001"), ("[fe80::1]", "[fe80::1]:7001")]
)
def test_root_address_uses_the_next_port(master: str, address: str) -> None:
    assert root_comm_id(World(size=2, master_addr=master, master_port=7000)) == address


def test_user_compiler_flags_win() -> None:
    defaults = {"NEURON_CC_FLAGS": "--model-type=transformer --auto-cast=none --retry_failed_compilation"}
    changes = merge_env(defaults, {"NEURON_CC_FLAGS": "-O1 --auto-cast matmult --cache_dir=/mine"})
    assert changes["NEURON_CC_FLAGS"].split() == [
        "--model-type=transformer",
        "--retry_failed_compilation",
        "-O1",
        "--auto-cast",
        "matmult",
        "--cache_dir=/mine",
    ]


def test_merge_env_is_idempotent() -> None:
    """Two Trainers in one process set the same variables."""
    defaults = xla_environment("trn1", 1, "bf16", World(3, 32, 3, 32), "/cache")
    first = merge_env(defaults, {})
    again = merge_env(
        xla_environment("trn1", 1, "bf16", World(3, 32, 3, 32), "/cache", "3"),
        first,
    )
    assert first | again == first


def test_device_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    device = XlaDevice(TRN1)
    assert device.max_local_ranks() == 32
    assert device.describe() == "trn1.32xlarge through XLA, a core of 16 GiB"
    peak = device.peak_throughput(torch.bfloat16)
    assert peak is not None
    assert peak.flops == pytest.approx(95e12)
    order = device.rank_order(4, 32)
    assert order is not None
    assert order[:4] == [0, 8, 16, 24]
    assert device.supports_group(range(8))
    assert not device.supports_group(range(4)), "four consecutive cores"
    assert device.compile_options() is None, "torch_xla compiles everything"
    with pytest.raises(UserError, match="local rank 32: this machine has 32 cores"):
        device.prepare(False, World(32, 64, 32, 64), "bf16")


def test_other_pjrt_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    device = XlaDevice(TRN1)
    assert device.describe() == "XLA on CPU"
    assert device.peak_throughput(torch.bfloat16) is None
    assert device.rank_order(4, 32) is None
    assert device.supports_group(range(3))
