"""Files of torch.save are read as torch.load reads them, in any slice, and written files are read by torch."""

import collections
import os
import random
import sys
import time
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.examples import examples
from trainyard.core.errors import UserError
from trainyard.formats.io import torch_writer
from trainyard.formats.io.lazy_tensor import LazyTensor
from trainyard.formats.io.torch_file import open_torch_file
from trainyard.formats.io.torch_writer import TorchFileWriter, XserWriter

TYPED = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
NEWER = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32]


def save(value: Any, path: Path, zipped: bool = True, protocol: int = 2) -> Path:
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    return path


def random_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * 5).abs().to(dtype)


def example_state(dtypes: list[torch.dtype]) -> dict[str, Tensor]:
    shapes = {"matrix": (3, 5), "scalar": (), "empty": (0, 4), "vector": (7,)}
    return {f"{dtype}.{name}": random_tensor(dtype, *shape) for dtype in dtypes for name, shape in shapes.items()}


def read_tensors(value: Any) -> Any:
    """Replace every LazyTensor by its tensor."""
    if isinstance(value, LazyTensor):
        read = value.read()
        assert (tuple(read.shape), read.dtype) == (value.shape, value.dtype)
        return read
    if isinstance(value, dict):
        return {name: read_tensors(item) for name, item in value.items()}
    return type(value)(map(read_tensors, value)) if type(value) in (list, tuple) else value


def assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        assert bits(actual) == bits(expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for name in expected:
            assert_equal(actual[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected)
        for a, b in zip(actual, expected, strict=True):
            assert_equal(a, b)
    elif isinstance(expected, np.ndarray):
        native = expected.astype(expected.dtype.newbyteorder("="))  # numpy returns native byte order too
        native_actual = actual.astype(native.dtype) if actual.dtype == expected.dtype else actual
        assert (native_actual.dtype, native_actual.shape, native_actual.tobytes()) == (
            native.dtype,
            native.shape,
            native.tobytes(),
        )
    else:
        assert actual == expected


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()


def repack(path: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """Write the same records to another zip file, in which nothing is aligned."""
    to = path.with_name("repacked.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w") as new:
        for record in old.namelist():
            new.writestr(record, change(record.partition("/")[2], old.read(record)))
    return to


@pytest.mark.parametrize(("dtypes", "zipped"), [(TYPED, True), (TYPED, False), (NEWER, True), (NEWER, False)])
def test_dtypes(dtypes: list[torch.dtype], zipped: bool, tmp_path: Path) -> None:
    state = example_state(dtypes)
    value = open_torch_file(save(state, tmp_path / "a.pt", zipped))
    assert_equal(read_tensors(value), state)
    for dtype in dtypes:
        name, index = f"{dtype}.matrix", (slice(1, 3), slice(2, 4))
        assert_equal(value[name].read(index), state[name][index])


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A sliced, strided, permuted and perhaps expanded view of a storage."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    full = torch.arange(torch.Size(shape).numel()).reshape(shape).to(draw(st.sampled_from([torch.float32, torch.int8])))
    cut = full[tuple(slice(draw(st.integers(0, size)), size, draw(st.integers(1, 2))) for size in shape)]
    permuted = cut.permute(draw(st.permutations(range(cut.dim()))))
    return permuted.unsqueeze(0).expand(3, *permuted.shape) if draw(st.booleans()) else permuted


@given(views(), st.booleans(), st.data())
@examples(60)
def test_any_slice_of_any_view(tmp_path_factory: pytest.TempPathFactory, view: Tensor, zipped: bool, data: Any) -> None:
    path = save([view], tmp_path_factory.mktemp("views") / "a.pt", zipped)
    (lazy,) = open_torch_file(path)
    ends = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in view.shape]
    index = tuple(slice(start, stop) for start, stop in ends)
    assert_equal(lazy.read(index), view[index])
    assert_equal(lazy.read(), view)


@pytest.mark.parametrize("zipped", [True, False])
def test_other_values_in_checkpoints(zipped: bool, tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    marked = base.clone()
    marked.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter = nn.Parameter(base.clone())
    parameter.partition_dim = 0  # type: ignore[attr-defined]
    state = {
        "module": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict(),
        "views": [base, base[1], base.T, base.view(-1)[3:5]],
        "parameters": (nn.Parameter(base), parameter, marked),
        "numbers": [None, True, -3, 2**70, 1.5, 2 + 1j],
        "texts": ("text ü", b"\0\xff", b"", bytearray(b"ab")),
        "sets": [{1, "a"}, frozenset([2])],
        "torch": (torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)),
        "keys": {1: "a", (2, "b"): "c", None: 0, 1.5: 2},
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, {"a": [1]}),
        "numpy": [np.arange(6, dtype=">i4").reshape(2, 3), np.asfortranarray(np.eye(2, 3)), np.zeros(0, np.float16)],
        "random": [random.getstate(), torch.get_rng_state()],
    }
    for protocol in (2, 5):
        path = save(state, tmp_path / "a.pt", zipped, protocol)
        value = read_tensors(open_torch_file(path))
        assert_equal(value, state)
        assert type(value["ordered"]) is type(value["default"]) is dict
    scalars = {
        "a": np.float32(1.5),
        "b": np.int64(3),
        "c": np.bool_(True),
        "state": np.random.RandomState(0).get_state(),
    }
    value = open_torch_file(save(scalars, tmp_path / "b.pt", zipped))
    assert (value["a"], value["b"], value["c"]) == (1.5, 3, True)
    assert {type(value[name]) for name in "abc"} == {float, int, bool}
    assert_equal(value["state"], scalars["state"])


def test_tensors_inside_the_pickle(tmp_path: Path) -> None:
    """Older versions of torch saved tensors of a device without storages as numpy arrays, and bf16 as fp32."""

    class Device:
        def __reduce__(self) -> Any:
            make = torch._utils._rebuild_device_tensor_from_numpy
            return make, (np.arange(6, dtype=np.float32).reshape(2, 3), torch.bfloat16, "xla:0", False)

    path = save({"a": Device()}, tmp_path / "a.pt")
    older = repack(path, lambda _, data: data.replace(b"_rebuild_device_tensor_from_numpy", b"_rebuild_xla_tensor"))
    for each in (path, older):
        part = open_torch_file(each)["a"].read((slice(0, 2), slice(1, 2)))
        assert_equal(part, torch.tensor([[1], [4]], dtype=torch.bfloat16))


def test_byte_order_alignment_and_checksums(tmp_path: Path) -> None:
    state = example_state(TYPED)
    widths = [tensor.itemsize // (2 if tensor.is_complex() else 1) for tensor in state.values()]

    def swap(record: str, data: bytes) -> bytes:
        if record.startswith("data/"):
            width = widths[int(record.removeprefix("data/"))]
            return b"".join(data[at : at + width][::-1] for at in range(0, len(data), width))
        return b"big" if record == "byteorder" else data

    path = save(state, tmp_path / "a.pt")
    assert_equal(read_tensors(open_torch_file(repack(path, lambda _, data: data))), state)
    swapped = repack(path, swap)
    assert_equal(read_tensors(open_torch_file(swapped)), torch.load(swapped))
    torch.serialization.set_crc32_options(False)
    try:
        assert_equal(read_tensors(open_torch_file(save(state, path))), state)
    finally:
        torch.serialization.set_crc32_options(True)


def test_a_small_slice_of_a_large_file(tmp_path: Path) -> None:
    """The file has 16 GiB, sparse. Neither opening it nor reading a slice of a tensor touches the rest."""
    path = tmp_path / "a.pt"
    with torch.serialization.skip_data():
        torch.save({"a": torch.arange(3), "b": torch.empty(2**20, 2**12), "c": torch.ones(5)}, path)
    before, start = psutil.Process().memory_info().rss, time.monotonic()
    state = open_torch_file(path)
    rows = state["b"].read((slice(2**20 - 3, 2**20), slice(0, 2**12)))
    assert rows.shape == (3, 2**12)
    assert not rows.any()
    assert state["c"].read().tolist() == [0] * 5
    assert time.monotonic() - start < 10
    assert psutil.Process().memory_info().rss - before < 2**26
    rows.fill_(1)
    del rows
    assert not state["b"].read((slice(2**20 - 3, 2**20), slice(0, 2**12))).any()  # the mapping is private


def test_a_file_that_changed_after_opening_is_refused(tmp_path: Path) -> None:
    path = save({"a": torch.arange(3)}, tmp_path / "a.pt")
    state = open_torch_file(path)
    save({"a": torch.arange(4), "b": torch.ones(2)}, path)
    with pytest.raises(UserError, match="changed after it was opened"):
        state["a"].read()
    path.unlink()
    with pytest.raises(UserError, match="No such file"):
        state["a"].read()


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Creates classes under the names of packages that are not installed."""

    def make(full: str) -> Any:
        *modules, name = full.split(".")
        for depth in range(1, len(modules) + 1):
            module = ".".join(modules[:depth])
            monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        setattr(sys.modules[module], name, type(name, (), {"__module__": module}))
        return getattr(sys.modules[module], name)

    return make


TORCH_XLA = "torch_xla.utils.serialization.TensorReference"


def write_tensor_files(path: Path, tensors: list[Tensor], kind: Any, **attributes: Any) -> list[Any]:
    """Write each tensor to a file. Returns references to them."""
    folder = Path(f"{path}.tensors")
    folder.mkdir()
    references = []
    for tid, tensor in enumerate(tensors):
        save(tensor, folder / f"tensor_{tid}.pt")
        references.append(kind())
        references[-1].__dict__.update(tid=tid, **attributes)
    return references


def test_references_of_torch_xla(reference: Callable[[str], Any], tmp_path: Path) -> None:
    path, tensors = tmp_path / "dp_rank_00.pt", [random_tensor(torch.bfloat16, 4, 6), torch.arange(5)]
    first, second = write_tensor_files(path, tensors, reference(TORCH_XLA))
    save({"model": {"a": first, "here": torch.ones(2)}, "list": [second]}, path)
    for _ in range(2):  # without the info file, as NxD up to 0.6.0 left it, and with it
        state = open_torch_file(path)
        assert_equal(read_tensors(state), {"model": {"a": tensors[0], "here": torch.ones(2)}, "list": [tensors[1]]})
        assert_equal(state["model"]["a"].read((slice(1, 2), slice(0, 3))), tensors[0][1:2, :3])
        info = {tid: {"dtype": tensor.dtype, "shape": tensor.shape} for tid, tensor in enumerate(tensors)}
        save(info, Path(f"{path}.info.pt"))
    (Path(f"{path}.tensors") / "tensor_0.pt").unlink()
    missing = open_torch_file(path)["model"]["a"]
    assert (missing.shape, missing.dtype) == ((4, 6), torch.bfloat16)
    with pytest.raises(UserError, match=r"tensor_0\.pt: cannot be read: No such file"):
        missing.read()
    save({1: {"dtype": torch.int64, "shape": torch.Size([6])}}, Path(f"{path}.info.pt"))
    with pytest.raises(UserError, match=r"tensor_1\.pt: \[5\] of torch.int64, but its reference says \[6\]"):
        open_torch_file(path)["list"][0].read()


def test_references_of_nxd_and_nemo(reference: Callable[[str], Any], tmp_path: Path) -> None:
    """They have a shape and a dtype. NxD leaves its internal references in lists, which it does not traverse."""
    names = (
        "neuronx_distributed.trainer.checkpoint._InternalTensorReference",
        "nemo.collections.nlp.parts.serialization",
    )
    for name in (names[0], f"{names[1]}.TensorReference"):
        path, tensor = tmp_path / f"{name}.pt", random_tensor(torch.float32, 2, 3)
        (ref,) = write_tensor_files(path, [tensor], reference(name), shape=torch.Size([2, 3]), dtype=torch.float32)
        save({"optimizer": [{"exp_avg": ref}]}, path)
        assert_equal(read_tensors(open_torch_file(path)), {"optimizer": [{"exp_avg": tensor}]})


def test_an_empty_directory_of_tensors(tmp_path: Path) -> None:
    """NxD's converter writes these: CPU tensors stay in the file."""
    path = save({"a": torch.arange(4)}, tmp_path / "a.pt")
    Path(f"{path}.tensors").mkdir()
    assert_equal(read_tensors(open_torch_file(path)), {"a": torch.arange(4)})


def test_invalid_references(reference: Callable[[str], Any], tmp_path: Path) -> None:
    path, kind = tmp_path / "a.pt", reference(TORCH_XLA)
    for tid in ("../../etc", -1, None, True):
        ref = kind()
        ref.tid = tid
        with pytest.raises(UserError, match="invalid tensor reference"):
            open_torch_file(save([ref], path))
    ref.tid = 0
    save([ref], path)
    Path(f"{path}.tensors").mkdir()
    for other in (ref, {"a": torch.ones(1)}):  # a reference to a reference, and a dict
        save(other, Path(f"{path}.tensors") / "tensor_0.pt")
        with pytest.raises(UserError, match="expected a tensor"):
            open_torch_file(path)[0].read()


@pytest.mark.parametrize("zip64", [False, True])
def test_torch_reads_written_files(zip64: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """`zip64`: with 64-bit sizes and offsets, as if the files were larger than 4 GiB."""
    if zip64:
        monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
        monkeypatch.setattr(torch_writer, "_ZIP64_BYTES", 90)
    path, state = tmp_path / "a.pt", example_state(TYPED + NEWER)
    state["permuted"], state["cut"] = random_tensor(torch.float32, 4, 6).T, torch.arange(100)[7:9]
    writer = TorchFileWriter(path)
    for name, tensor in state.items():
        writer.add(name, tensor)
    writer.close()
    assert os.listdir(tmp_path) == ["a.pt"]
    for mapped in (False, True):
        by_torch = torch.load(path, weights_only=True, mmap=mapped)
        assert_equal(by_torch, state)
    assert_equal(read_tensors(open_torch_file(path)), state)
    with zipfile.ZipFile(path) as written:
        assert written.testzip() is None
    assert {tensor.data_ptr() % 64 for tensor in by_torch.values()} == {0}


def test_xser_is_written_and_read(tmp_path: Path, reference: Callable[[str], Any]) -> None:
    path, state = tmp_path / "a.pt", example_state(TYPED + NEWER)
    writer = XserWriter(path)
    for name, tensor in state.items():
        writer.add(name, tensor)
    assert not any(name.partition(".")[0] == "torch_xla" for name in sys.modules)
    writer.close()
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "a.pt.info.pt", "a.pt.tensors"]
    assert_equal(read_tensors(open_torch_file(path)), state)
    kind = reference(TORCH_XLA)
    with torch.serialization.safe_globals([kind]):
        state_by_torch = torch.load(path, weights_only=True)
    info = torch.load(f"{path}.info.pt", weights_only=True)
    for tid, (name, ref) in enumerate(state_by_torch.items()):
        assert (type(ref), ref.__dict__) == (kind, {"tid": tid})
        tensor = torch.load(f"{path}.tensors/tensor_{tid}.pt", weights_only=True)
        assert_equal(tensor, state[name])
        assert info[tid] == {"dtype": tensor.dtype, "shape": tensor.shape, "expert_model_parallel": False}


@pytest.mark.parametrize("kind", [TorchFileWriter, XserWriter])
def test_an_abandoned_writer_leaves_nothing_readable(kind: Any, tmp_path: Path) -> None:
    path, process = tmp_path / "a.pt", psutil.Process()
    before = process.num_fds()
    writer = kind(path)
    writer.add("a", torch.ones(3))
    writer.abandon()
    assert process.num_fds() == before
    with pytest.raises(UserError):
        open_torch_file(path)
    writer = kind(tmp_path / "b.pt")
    writer.close()
    writer.abandon()
    assert open_torch_file(tmp_path / "b.pt") == {}


def test_lazy_tensors_keep_no_files_open(tmp_path: Path) -> None:
    """A checkpoint can have more tensors than a process may have open files."""
    writer = XserWriter(tmp_path / "a.pt")
    for number in range(50):
        writer.add(str(number), torch.ones(3))
    writer.close()
    process = psutil.Process()
    before = process.num_fds()
    state = open_torch_file(tmp_path / "a.pt")
    total = sum(tensor.read().sum() for tensor in state.values())
    assert total == 150
    assert process.num_fds() == before
