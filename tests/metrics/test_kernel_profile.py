"""The table of `trainyard profile`, compared with what torch's profiler says about the same trace."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trainyard.core.errors import UserError
from trainyard.metrics.kernel_profile import (
    DIRECTORY,
    TRACE_SUFFIX,
    find_traces,
    kernel_kind,
    kernel_times,
    profile_name,
    read_trace,
    time_by_kind,
)


def test_operators_of_a_cpu_have_the_times_that_torch_computes(tmp_path: Path) -> None:
    x, weight = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        for _ in range(20):
            torch.nn.functional.silu(torch.nn.functional.linear(x, weight)).sum().backward()
    path = tmp_path / "trace.json.gz"
    traced.export_chrome_trace(str(path))
    times = read_trace(path)
    expected = {event.key: event for event in traced.key_averages()}
    assert not times.on_device
    assert times.peak_bytes
    assert times.kernels.keys() <= expected.keys()
    for name in ("aten::linear", "aten::mm", "aten::silu", "aten::silu_backward", "aten::sum"):
        if name != "aten::sum":  # it calls itself, which torch counts as one
            assert times.kernels[name].calls == expected[name].count
        assert times.kernels[name].milliseconds == pytest.approx(expected[name].self_cpu_time_total / 1000, abs=0.05)
    total = sum(time.milliseconds for time in times.kernels.values())
    assert sum(time_by_kind({name: time.milliseconds for name, time in times.kernels.items()}).values()) == (
        pytest.approx(total)
    )


def test_kernels_of_a_gpu_count_without_the_operators_that_start_them() -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 900, "tid": 1},
        {"ph": "X", "cat": "kernel", "name": "nvjet_tst_128x256", "ts": 10, "dur": 2000.5, "tid": 7},
        {"ph": "X", "cat": "kernel", "name": "nvjet_tst_128x256", "ts": 10, "dur": 1000, "tid": 7},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "ts": 10, "dur": 500, "tid": 7},
        {"ph": "i", "name": "other"},
    ]
    times = kernel_times(events)
    assert times.on_device
    assert times.kernels == {"nvjet_tst_128x256": (3.0005, 2), "Memset (Device)": (0.5, 1)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("nvjet_hsh_192x192_64x3", "matmul"),
        ("aten::addmm", "matmul"),
        ("_rms_norm_forward", "norm"),
        ("_swiglu_backward", "activation"),
        ("_softmax_rows", "loss"),
        ("_ChunkedCrossEntropy", "loss"),
        ("_adamw", "update"),
        ("triton_poi_fused_add_3", "compiled"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "add, copy, fill"),
        ("aten::view", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kernel_kind(name) == kind


def test_traces_of_a_run(tmp_path: Path) -> None:
    directory = tmp_path / DIRECTORY
    assert find_traces(tmp_path) == []
    directory.mkdir()
    for rank, first, last in ((0, 10, 12), (1, 10, 12), (0, 3, 4)):
        (directory / (profile_name(rank, first, last) + TRACE_SUFFIX)).write_bytes(b"")
    (directory / ".part-rank-00000-steps-20-22.trace.json.gz").write_bytes(b"")
    assert [(trace.rank, trace.first_step, trace.steps) for trace in find_traces(tmp_path)] == [
        (0, 10, 3),
        (1, 10, 3),
        (0, 3, 2),
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b'{"traceEvents": 3}',
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a"}]}',
        gzip.compress(json.dumps({"traceEvents": []}).encode(), mtime=0)[:-9],
        b"\x1f\x8b" + b"x" * 50,
        b"[" * 100_000,
    ],
)
def test_a_damaged_trace_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a trace") as error:
        read_trace(path)
    assert "\n" not in str(error.value)
