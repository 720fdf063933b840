"""The globals that the pickle of a checkpoint may use, and what each becomes. None is ever imported or called.

Tensors become LazyTensors, dtype names become dtypes, and containers plain containers. Attributes that torch or a
framework attached to tensors and dicts are dropped.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import torch

from trainyard.formats.io.lazy_tensor import InlineTensor, LazyTensor, StorageView, check_sizes
from trainyard.formats.io.pickle_vm import AllowedGlobal, StubObject, check_key, describe

STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
"""The typed storage classes of module torch. Newer dtypes have untyped storages."""
REBUILD_MODULE = ".".join(("torch", "_utils"))
"""The module of the functions that rebuild tensors. Used only as a string."""
REFERENCE_CLASSES = (
    "torch_xla.utils.serialization.TensorReference",
    "neuronx_distributed.trainer.checkpoint._InternalTensorReference",
    "nemo.collections.nlp.parts.serialization.TensorReference",
)
"""Classes of references to tensors in separate files: torch-xla's; the one that NxD writes for tensors inside lists;
and that of NeMo Megatron for Neuron. All have an attribute `tid`; the last two also have `shape` and `dtype`."""
_NUMPY_CODES = ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


class StorageType(AllowedGlobal):
    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__(name)
        self.dtype = dtype


class NamespaceDict(dict[str, Any]):
    """An argparse.Namespace as a dict."""

    def set_state(self, state: Any) -> None:
        if type(state) is not dict:
            raise ValueError("Namespace without names")
        self.update(state)


class NumpyDtype:
    """A numpy dtype, whose byte order is set afterwards."""

    def __init__(self, code: Any, *_: Any) -> None:
        if code not in _NUMPY_CODES:
            raise ValueError("numpy values are not numbers")
        self.dtype = np.dtype(code)

    def set_state(self, state: Any) -> None:
        if type(state) is not tuple or state[1] not in ("<", ">", "|", "="):
            raise ValueError("numpy dtype of unknown byte order")
        self.dtype = self.dtype.newbyteorder(state[1])


def _check_array(shape: Any, kind: Any, data: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if not isinstance(kind, NumpyDtype) or not isinstance(data, bytes | bytearray):
        raise ValueError("numpy array of values that are not numbers")
    if prod(check_sizes(shape)) * kind.dtype.itemsize != len(data):
        raise ValueError(f"numpy array of {len(data)} bytes does not match its shape")
    return check_sizes(shape), kind.dtype


def _set_array_state(array: Any, state: Any) -> None:
    _, shape, kind, fortran, data = state
    if array.size:  # numpy would free memory that a tensor may view
        raise ValueError("numpy array with two states")
    array.__setstate__((1, *_check_array(shape, kind, data), fortran is True, bytes(data)))


def _numpy_array(data: Any, kind: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    """A numpy array as pickle protocol 5 stores it."""
    shape, dtype = _check_array(shape, kind, data)
    return np.frombuffer(bytearray(data), dtype).reshape(shape, order="F" if order == "F" else "C")


def _empty_array(kind: Any, *_: Any) -> np.ndarray[Any, Any]:
    if not isinstance(kind, AllowedGlobal) or kind.name != "numpy.ndarray":
        raise ValueError(f"numpy array of class {describe(kind)}")
    return np.empty(0, np.int8)


def _encode_latin1(text: Any, encoding: Any) -> bytes:
    """Bytes as pickle protocol 2 stores them."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes in unknown encoding")
    return text.encode("latin1")


def _device(*args: Any) -> torch.device:
    if not all(type(arg) in (str, int) for arg in args):
        raise ValueError("invalid device")
    return torch.device(*args)


def _complex(*parts: Any) -> complex:
    if not all(type(part) is float for part in parts):
        raise ValueError("complex number of values that are not numbers")
    return complex(*parts)


def _rebuild_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any = 0, _hooks: Any = 0, flags: Any = None
) -> StorageView:
    return _rebuild_tensor_v3(storage, offset, shape, stride, _grad, _hooks, getattr(storage, "dtype", None), flags)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, flags: Any = None
) -> StorageView:
    if isinstance(flags, dict) and (flags.get("conj") or flags.get("neg")):
        raise ValueError("conjugated or negated view of a tensor")
    return StorageView(storage, dtype, offset, shape, stride)


def _rebuild_from_numpy(array: Any, dtype: Any, *_: Any) -> LazyTensor:
    if not isinstance(array, np.ndarray) or not isinstance(dtype, torch.dtype) or dtype.itemsize > array.itemsize:
        raise ValueError("tensor without values or dtype")
    return InlineTensor(torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False)).to(dtype))


def _unwrap_tensor(tensor: Any, *_: Any) -> LazyTensor:
    """The tensor in a parameter, or in a tensor of another device."""
    if not isinstance(tensor, LazyTensor):
        raise ValueError("parameter without a tensor")
    return tensor


def _rebuild_with_attributes(function: Any, kind: Any, arguments: Any, _state: Any) -> Any:
    """A tensor with attributes that a framework attached to it."""
    if type(kind) is StubObject:
        return StubObject(kind.name)
    if not isinstance(function, AllowedGlobal) or function.call is None or not isinstance(arguments, tuple):
        raise ValueError(f"tensor built by {describe(function)}")
    return _unwrap_tensor(function.call(*arguments))


def _numpy_calls(core: str) -> dict[str, Callable[..., Any] | None]:
    return {
        f"{core}.multiarray._reconstruct": _empty_array,
        f"{core}.multiarray.scalar": lambda kind, data: _numpy_array(data, kind, (), None).item(),
        f"{core}.numeric._frombuffer": _numpy_array,
    }


def _as_list(items: Any) -> list[Any]:
    if not isinstance(items, list | tuple):
        raise ValueError(f"expected a list, found {describe(items)}")
    return list(items)


def _as_keys(items: Any = ()) -> list[Any]:
    return [check_key(item) for item in _as_list(items)]


def _ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    return {check_key(name): value for name, value in map(_as_list, _as_list(pairs))}


_ALLOWED_CALLS: dict[str, Callable[..., Any] | None] = {
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": lambda *_: {},
    "argparse.Namespace": NamespaceDict,
    "builtins.set": lambda *items: set(_as_keys(*items)),
    "builtins.frozenset": lambda *items: frozenset(_as_keys(*items)),
    "builtins.bytes": lambda: b"",
    "builtins.bytearray": lambda *data: bytearray(b"".join(data)),
    "builtins.complex": _complex,
    # Default factories of a defaultdict, and types in arguments.
    **dict.fromkeys([f"builtins.{name}" for name in ("dict", "list", "tuple", "int", "float", "str", "bool")]),
    "_codecs.encode": _encode_latin1,
    **_numpy_calls("numpy.core"),
    **_numpy_calls(".".join(("numpy", "_core"))),
    "numpy.ndarray": None,
    "numpy.dtype": NumpyDtype,
    "torch.Size": lambda shape: torch.Size(check_sizes(shape)),
    "torch.device": _device,
    "torch.Tensor": None,
    "torch.nn.parameter.Parameter": None,
    f"{REBUILD_MODULE}._rebuild_tensor": _rebuild_tensor,
    f"{REBUILD_MODULE}._rebuild_tensor_v2": _rebuild_tensor,
    f"{REBUILD_MODULE}._rebuild_tensor_v3": _rebuild_tensor_v3,
    f"{REBUILD_MODULE}._rebuild_parameter": _unwrap_tensor,
    f"{REBUILD_MODULE}._rebuild_parameter_with_state": _unwrap_tensor,
    f"{REBUILD_MODULE}._rebuild_xla_tensor": _rebuild_from_numpy,
    f"{REBUILD_MODULE}._rebuild_device_tensor_from_numpy": _rebuild_from_numpy,
    f"{REBUILD_MODULE}._rebuild_device_tensor_from_cpu_tensor": _unwrap_tensor,
    ".".join(("torch", "_tensor", "_rebuild_from_type_v2")): _rebuild_with_attributes,
}

ALLOWED_GLOBALS: Mapping[str, Any] = {
    **{name: AllowedGlobal(name, call) for name, call in _ALLOWED_CALLS.items()},
    **{f"torch.{name}": StorageType(name, dtype) for name, dtype in STORAGE_DTYPES.items()},
    **{
        f"torch.{name}": StorageType(name, torch.uint8)
        for name in ("UntypedStorage", "storage.UntypedStorage", "storage._UntypedStorage", "storage.TypedStorage")
    },
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
"""The value of each allowed global, by full name."""

STATE_SETTERS: Mapping[type, Callable[[Any, Any], None]] = {
    StubObject: lambda _, state: None,
    dict: lambda _, state: None,  # attributes of an OrderedDict: versions of modules
    NamespaceDict: NamespaceDict.set_state,
    np.ndarray: _set_array_state,
    NumpyDtype: NumpyDtype.set_state,
}
"""Functions that apply a state to an object, by its exact type."""
