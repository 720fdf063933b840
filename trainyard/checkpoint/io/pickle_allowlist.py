"""The names that a checkpoint's pickle may use, and what we make of each. None is ever imported or called.

Tensors become Lazy tensors, names of dtypes the dtypes, containers plain ones. Attributes that torch or a framework
hung on tensors and dictionaries are dropped.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import torch

from trainyard.checkpoint.io.lazy_tensor import Inline, Lazy, View, sizes
from trainyard.checkpoint.io.pickle_limits import Inert, Known, described, key

STORAGES = {
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
"""The storages with a name of their own, in module torch. Newer dtypes have untyped ones."""
REBUILD = ".".join(("torch", "_utils"))
"""Where torch's functions live that make tensors again. Only ever a string here."""
REFERENCES = (
    "torch_xla.utils.serialization.TensorReference",
    "neuronx_distributed.trainer.checkpoint._InternalTensorReference",
    "nemo.collections.nlp.parts.serialization.TensorReference",
)
"""Stand-ins for tensors with files of their own: torch-xla's; the one that NxD itself leaves for tensors inside lists;
and the one of NeMo Megatron for Neuron. All have an attribute `tid`, the others `shape` and `dtype` too."""


_NUMBERS = ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


class StorageKind(Known):
    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__(name)
        self.dtype = dtype


class Namespace(dict[str, Any]):
    """What argparse gave a program, as a dict."""

    def fill(self, state: Any) -> None:
        if type(state) is not dict:
            raise ValueError("arguments without names")
        self.update(state)


class NumpyType:
    """A dtype of numpy; its byte order comes after the rest."""

    def __init__(self, code: Any, *_: Any) -> None:
        if code not in _NUMBERS:
            raise ValueError("numpy values that are not numbers")
        self.dtype = np.dtype(code)

    def fill(self, state: Any) -> None:
        if type(state) is not tuple or state[1] not in ("<", ">", "|", "="):
            raise ValueError("a numpy dtype of unknown byte order")
        self.dtype = self.dtype.newbyteorder(state[1])


def _checked(shape: Any, kind: Any, data: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if not isinstance(kind, NumpyType) or not isinstance(data, bytes | bytearray):
        raise ValueError("a numpy array of other things than numbers")
    if prod(sizes(shape)) * kind.dtype.itemsize != len(data):
        raise ValueError(f"a numpy array of {len(data)} bytes, with another shape")
    return sizes(shape), kind.dtype


def _fill_array(array: Any, state: Any) -> None:
    _, shape, kind, fortran, data = state
    if array.size:  # numpy would free memory that a tensor may be a view of
        raise ValueError("a numpy array filled twice")
    array.__setstate__((1, *_checked(shape, kind, data), fortran is True, bytes(data)))


def _array(data: Any, kind: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    """As protocol 5 has them."""
    shape, dtype = _checked(shape, kind, data)
    return np.frombuffer(bytearray(data), dtype).reshape(shape, order="F" if order == "F" else "C")


def _new_array(kind: Any, *_: Any) -> np.ndarray[Any, Any]:
    if not isinstance(kind, Known) or kind.name != "numpy.ndarray":
        raise ValueError(f"a numpy array as {described(kind)}")
    return np.empty(0, np.int8)


def _scalar(kind: Any, data: Any) -> Any:
    return _array(data, kind, (), None).item()


def _encoded(text: Any, encoding: Any) -> bytes:
    """How a pickle of protocol 2 spells bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes in an unknown encoding")
    return text.encode("latin1")


def _device(*words: Any) -> torch.device:
    if not all(type(word) in (str, int) for word in words):
        raise ValueError("a device that is none")
    return torch.device(*words)


def _no_flags(metadata: Any) -> None:
    if isinstance(metadata, dict) and (metadata.get("conj") or metadata.get("neg")):
        raise ValueError("a conjugated or negated view of a tensor")


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any = 0, _hooks: Any = 0, flags: Any = None
) -> View:
    _no_flags(flags)
    return View(storage, getattr(storage, "dtype", None), offset, shape, stride)


def _tensor_with_dtype(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, flags: Any = None
) -> View:
    _no_flags(flags)
    return View(storage, dtype, offset, shape, stride)


def _tensor_of_numpy(array: Any, dtype: Any, *_: Any) -> Lazy:
    if not isinstance(array, np.ndarray) or not isinstance(dtype, torch.dtype) or dtype.itemsize > array.itemsize:
        raise ValueError("a tensor without values or dtype")
    return Inline(torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False)).to(dtype))


def _same(tensor: Any, *_: Any) -> Lazy:
    """A parameter, or a tensor of another device: the tensor in it."""
    if not isinstance(tensor, Lazy):
        raise ValueError("a parameter without a tensor")
    return tensor


def _with_attributes(function: Any, kind: Any, arguments: Any, _state: Any) -> Any:
    """A tensor that a framework hung attributes on."""
    if type(kind) is Inert:
        return Inert(kind.name)
    if not isinstance(function, Known) or function.call is None or not isinstance(arguments, tuple):
        raise ValueError(f"a tensor made by {described(function)}")
    return _same(function.call(*arguments))


def _numpy(core: str) -> dict[str, Callable[..., Any] | None]:
    return {
        f"{core}.multiarray._reconstruct": _new_array,
        f"{core}.multiarray.scalar": _scalar,
        f"{core}.numeric._frombuffer": _array,
    }


def _members(items: Any = ()) -> list[Any]:
    return [key(item) for item in _listed(items)]


def _ordered(pairs: Any = ()) -> dict[Any, Any]:
    return {key(name): value for name, value in map(_listed, _listed(pairs))}


def _listed(items: Any) -> list[Any]:
    if not isinstance(items, list | tuple):
        raise ValueError(f"{described(items)} where a list was expected")
    return list(items)


def _complex(*parts: Any) -> complex:
    if not all(type(part) is float for part in parts):
        raise ValueError("a complex number of other things than numbers")
    return complex(*parts)


_CALLS: dict[str, Callable[..., Any] | None] = {
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": lambda *_: {},
    "argparse.Namespace": Namespace,
    "builtins.set": lambda items=(): set(_members(items)),
    "builtins.frozenset": lambda items=(): frozenset(_members(items)),
    "builtins.bytes": lambda: b"",
    "builtins.bytearray": lambda *data: bytearray(b"".join(data)),
    "builtins.complex": _complex,
    # As the makers of missing values in a defaultdict, and as types in arguments.
    **dict.fromkeys([f"builtins.{name}" for name in ("dict", "list", "tuple", "int", "float", "str", "bool")]),
    "_codecs.encode": _encoded,
    **_numpy("numpy.core"),
    **_numpy(".".join(("numpy", "_core"))),
    "numpy.ndarray": None,
    "numpy.dtype": NumpyType,
    "torch.Size": lambda shape: torch.Size(sizes(shape)),
    "torch.device": _device,
    "torch.Tensor": None,
    "torch.nn.parameter.Parameter": None,
    f"{REBUILD}._rebuild_tensor": _tensor,
    f"{REBUILD}._rebuild_tensor_v2": _tensor,
    f"{REBUILD}._rebuild_tensor_v3": _tensor_with_dtype,
    f"{REBUILD}._rebuild_parameter": _same,
    f"{REBUILD}._rebuild_parameter_with_state": _same,
    f"{REBUILD}._rebuild_xla_tensor": _tensor_of_numpy,
    f"{REBUILD}._rebuild_device_tensor_from_numpy": _tensor_of_numpy,
    f"{REBUILD}._rebuild_device_tensor_from_cpu_tensor": _same,
    ".".join(("torch", "_tensor", "_rebuild_from_type_v2")): _with_attributes,
}

NAMES: Mapping[str, Any] = {
    **{name: Known(name, call) for name, call in _CALLS.items()},
    **{f"torch.{name}": StorageKind(name, dtype) for name, dtype in STORAGES.items()},
    **{
        f"torch.{name}": StorageKind(name, torch.uint8)
        for name in ("UntypedStorage", "storage.UntypedStorage", "storage._UntypedStorage", "storage.TypedStorage")
    },
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
"""By full name, the value it stands for."""

FILL: Mapping[type, Callable[[Any, Any], None]] = {
    Inert: lambda _, state: None,
    dict: lambda _, state: None,  # attributes of an OrderedDict: the versions of modules
    Namespace: Namespace.fill,
    np.ndarray: _fill_array,
    NumpyType: NumpyType.fill,
}
"""By exact type, how an object takes the state that follows it."""
