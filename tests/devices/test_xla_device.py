"""trn1's device without a trn1 and without torch_xla: what is decided before either is touched."""

import pytest
import torch

from trainyard import devices
from trainyard.core.errors import UserError
from trainyard.devices.neuron.environment import (
    PRECISION_FLAGS,
    LaunchInfo,
    compiler_flags,
    merge_env,
    root_comm_id,
    xla_environment,
)
from trainyard.devices.neuron.instance import TrainiumInstance
from trainyard.devices.neuron.xla_device import XlaDevice, missing_requirement

TRN1 = TrainiumInstance("trn1", 16, "trn1.32xlarge")
NOWHERE = TrainiumInstance(None, 0, "")


@pytest.mark.parametrize(
    ("here", "installed", "pjrt", "says"),
    [
        (TRN1, True, None, None),
        (NOWHERE, True, "CPU", None),
        (TRN1, False, None, "needs torch 2.9 with torch_xla 2.9"),
        (NOWHERE, True, None, "no Trainium here; PJRT_DEVICE=CPU"),
    ],
)
def test_why_there_is_no_such_device(
    here: TrainiumInstance, installed: bool, pjrt: str | None, says: str | None
) -> None:
    found = missing_requirement(here, installed, pjrt)
    assert found is None if says is None else says in str(found)


def test_asked_for_by_name_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainyard.devices.neuron.xla_device.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"device\.name=xla: needs torch 2\.9 with torch_xla 2\.9.*; here: .*cpu, auto"):
        devices.select("xla")


@pytest.mark.parametrize("precision", PRECISION_FLAGS)
def test_tensors_keep_the_types_we_gave_them(precision: str) -> None:
    """Neither the compiler nor torch_xla makes bf16 of what we keep in fp32, and no hardware rounds at random."""
    variables = xla_environment("trn1", 1, precision, LaunchInfo(), "/cache")
    assert variables["XLA_USE_BF16"] == variables["XLA_DOWNCAST_BF16"] == "0"
    assert variables["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "0"
    flags = variables["NEURON_CC_FLAGS"].split()
    assert "--auto-cast=none" in flags
    assert "--model-type=transformer" in flags
    assert ("--enable-mixed-precision-accumulation" in flags) == (precision != "fp32")


@pytest.mark.parametrize(
    ("generation", "lnc", "has", "lacks"),
    [
        ("trn1", 1, "--enable-saturate-infinity", "--lnc"),
        ("trn2", 2, "--lnc=2", "--enable-saturate-infinity"),
        ("trn2", 1, "--lnc=1", "--enable-saturate-infinity"),
    ],
)
def test_flags_of_a_generation(generation: str, lnc: int, has: str, lacks: str) -> None:
    flags = compiler_flags(generation, lnc, "bf16")
    assert has in flags
    assert not any(flag.startswith(lacks) for flag in flags)


def test_a_rank_is_told_its_place() -> None:
    launch = LaunchInfo(33, 64, 1, 32, "10.0.0.1", 41000)
    variables = xla_environment("trn1", 1, "bf16", launch, "/cache")
    assert variables["PJRT_DEVICE"] == "NEURON"
    assert variables["NEURON_PJRT_WORLD_SIZE"] == "64"
    assert variables["NEURON_PJRT_PROCESS_INDEX"] == "33"
    assert variables["PJRT_LOCAL_PROCESS_COUNT"] == "32"
    assert variables["PJRT_LOCAL_PROCESS_RANK"] == variables["NEURON_RT_VISIBLE_CORES"] == "1"
    assert variables["NEURON_RT_ROOT_COMM_ID"] == "10.0.0.1:41001"
    assert variables["FI_PROVIDER"] == "efa"
    assert variables["NEURON_COMPILE_CACHE_URL"] == "/cache"
    alone = xla_environment("trn1", 1, "bf16", LaunchInfo(), "/cache")
    assert not alone.keys() & {"NEURON_RT_ROOT_COMM_ID", "FI_PROVIDER", "NEURON_LOGICAL_NC_CONFIG"}


@pytest.mark.parametrize(
    ("master", "address"), [("host", "host:7001"), ("fe80::1:2", "[fe80::1:2]:7001"), ("[fe80::1]", "[fe80::1]:7001")]
)
def test_the_root_address_lies_beside_the_port_where_ranks_meet(master: str, address: str) -> None:
    assert root_comm_id(LaunchInfo(ranks=2, master_addr=master, port=7000)) == address


def test_the_users_flags_are_added_and_win() -> None:
    wanted = {"NEURON_CC_FLAGS": "--model-type=transformer --auto-cast=none --retry_failed_compilation"}
    changes = merge_env(wanted, {"NEURON_CC_FLAGS": "-O1 --auto-cast matmult --cache_dir=/mine"})
    assert changes["NEURON_CC_FLAGS"].split() == [
        "--model-type=transformer",
        "--retry_failed_compilation",
        "-O1",
        "--auto-cast",
        "matmult",
        "--cache_dir=/mine",
    ]


def test_settling_twice_changes_nothing_more() -> None:
    """Two Trainers in one process."""
    wanted = xla_environment("trn1", 1, "bf16", LaunchInfo(local_rank=3, local_world_size=32, ranks=32), "/cache")
    once = merge_env(wanted, {})
    again = merge_env(
        xla_environment("trn1", 1, "bf16", LaunchInfo(local_rank=3, local_world_size=32, ranks=32), "/cache", "3"), once
    )
    assert once | again == once


def test_a_device_knows_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert not device.supports_group(range(4)), "four neighbours"
    assert device.compile_options() is None, "all is compiled as it is"
    with pytest.raises(UserError, match="local rank 32: this machine has 32 cores"):
        device.prepare(False, 32, "bf16")


def test_another_pjrt_device_has_no_trainium_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    device = XlaDevice(TRN1)
    assert device.describe() == "XLA on CPU"
    assert device.peak_throughput(torch.bfloat16) is None
    assert device.rank_order(4, 32) is None
    assert device.supports_group(range(3))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="PJRT_DEVICE=CPU: 4 processes would not see each other; nearest: one rank"):
        device.prepare(False)
