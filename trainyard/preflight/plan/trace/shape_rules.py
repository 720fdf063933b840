"""Results of common operators on tensors without memory, from shapes alone.

torch has rules of its own for all of these. Most of them are Python that also imports torch's compiler: 1.9 s of
processor time, where a plan of Llama 3 70B takes 3.5 s. The compiler then registers other rules, and figures change.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainyard import compat
from trainyard.preflight.dryrun.meta_ops import tensors_in

NO_RULE = object()
"""Result of `shape_rule` for operators that it does not know."""
PREDICATES = {"eq", "ne", "ge", "gt", "le", "lt", "logical_not", "logical_and", "logical_or", "isnan", "isfinite"}
"""Elementwise operators whose result is bool."""
aten = torch.ops.aten
Rule = Callable[..., Any]


def shape_rule(function: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator, or NO_RULE."""
    rule = _rule_of(function)
    return rule(*args, **kwargs) if rule else NO_RULE


def _rule_of(function: Any) -> Rule | None:
    if function not in RULES:
        name = function.__name__.split(".")[0]
        rule: Rule | None = None
        if torch.Tag.pointwise in function.tags and "out" not in function.__name__:
            in_place = name.endswith("_") and not name.endswith("__")
            rule = _first if in_place else _predicate if name in PREDICATES else _elementwise
        RULES[function] = rule
    return RULES[function]


def _first(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


def _elementwise(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    tensors = tensors_in(args)
    values = tensors[1:] if tensors[0].dtype == torch.bool and len(tensors) > 1 else tensors  # the condition of `where`
    result = values[0].dtype
    for other in values[1:]:
        result = result if other.dtype == result else torch.result_type(values[0], other)
    if not result.is_floating_point and any(isinstance(value, float) for value in args):
        result = torch.float32
    return _like(tensors, dtype or result)


def _predicate(*args: Any, **kwargs: Any) -> Tensor:
    return _like(tensors_in(args), torch.bool)


def _like(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor with the broadcast shape, in the memory order of the inputs."""
    shape = tensors[0].shape
    if any(tensor.shape != shape for tensor in tensors[1:]):
        shape = broadcast_shape([tensor.shape for tensor in tensors])
    for tensor in tensors:
        if tensor.shape == shape and not tensor.is_contiguous():
            return torch.empty_strided(shape, dense_strides(tensor), dtype=dtype, device=tensor.device)
        if tensor.shape == shape:
            break
    return torch.empty(shape, dtype=dtype, device=tensors[0].device)


def broadcast_shape(shapes: list[torch.Size]) -> torch.Size:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return torch.Size(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def dense_strides(tensor: Tensor) -> list[int]:
    """Strides without gaps and in the order of the tensor's own."""
    strides, step = [0] * tensor.dim(), 1
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim) or 1 << 62, -dim))
    for dim in order:
        strides[dim] = step
        step *= max(tensor.shape[dim], 1)
    return strides


def _to_copy(x: Tensor, dtype: torch.dtype | None = None, memory_format: Any = None, **kwargs: Any) -> Tensor:
    return _clone(x, memory_format=memory_format, dtype=dtype)


def _clone_first(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _clone(x)


def _clone(x: Tensor, memory_format: Any = None, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    dtype = dtype or x.dtype
    if memory_format in (None, torch.preserve_format):
        return _like([x], dtype)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _arange(*args: Any, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Tensor:
    start, end = (0, args[0]) if len(args) == 1 else args[:2]
    return torch.empty(len(range(start, end, *args[2:3])), dtype=dtype or torch.int64, device=device)


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tensors[0].new_empty(shape)


def _stack(tensors: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return tensors[0].new_empty(shape)


def _reduce(x: Tensor, dims: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    dims = range(x.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    removed = {dim % x.dim() for dim in dims} if x.dim() else set()
    shape = [1 if dim in removed else size for dim, size in enumerate(x.shape) if keepdim or dim not in removed]
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device)


def _sum(x: Tensor, dims: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    exact = x.dtype.is_floating_point
    return _reduce(x, dims, keepdim, dtype or (x.dtype if exact else torch.int64))


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _like([x], torch.float32 if half_to_float else x.dtype)


def _softmax_backward(gradient: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return _like([gradient], dtype)


def _embedding(weight: Tensor, indices: Tensor, *args: Any) -> Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _embedding_backward(gradient: Tensor, indices: Tensor, rows: int, *args: Any) -> Tensor:
    return gradient.new_empty((rows, gradient.shape[-1]))


def _layer_norm(x: Tensor, shape: list[int], *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    stats = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
    mean, rstd = (torch.empty(stats, dtype=x.dtype, device=x.device) for _ in range(2))
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), mean, rstd


def _layer_norm_backward(gradient: Tensor, x: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    weight, bias, mask = args[3:6]
    sources = zip((x, weight, bias), mask, strict=True)
    return tuple(source.new_empty(source.shape) if used else None for source, used in sources)


def _mm(a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _addmm(x: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    return _mm(a, b)


def _out(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
    return out


def _flash(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out = _like([q], q.dtype) if v.shape[3] == q.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def _flash_on_gpu(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    empty = q.new_empty(0)
    return *_flash(q, k, v), None, None, q.shape[2], k.shape[2], empty, empty, empty


def _flash_backward(gradient: Tensor, *inputs: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Gradients have the memory order of the kernels, [B, T, H, K]."""
    return tuple(x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2) for x in inputs[:3])


def _slice_backward(gradient: Tensor, shape: list[int], *args: Any) -> Tensor:
    return gradient.new_empty(shape)


def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    shape = list(x.shape)
    shape[dim] = index.numel()
    return x.new_empty(shape)


def _gather(x: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
    return x.new_empty(index.shape)


def _topk(x: Tensor, k: int, dim: int = -1, *args: Any) -> tuple[Tensor, Tensor]:
    shape = list(x.shape)
    shape[dim] = k
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _sort(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _like([x], x.dtype), torch.empty_strided(x.shape, dense_strides(x), dtype=torch.int64, device=x.device)


def _cumsum(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _like([x], dtype or (x.dtype if x.dtype.is_floating_point else torch.int64))


RULES: dict[Any, Rule | None] = {
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten._to_copy.default: _to_copy,
    aten.clone.default: _clone,
    aten.empty_like.default: _clone,
    aten.zeros_like.default: _clone,
    aten.ones_like.default: _clone,
    aten.copy_.default: _first,
    aten.zero_.default: _first,
    aten.fill_.Scalar: _first,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _reduce,
    aten.amax.default: _reduce,
    aten.logsumexp.default: _reduce,
    aten.floor_divide.default: _elementwise,
    aten.topk.default: _topk,
    aten.sort.stable: _sort,
    aten.cumsum.default: _cumsum,
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax.default: _softmax,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten.mm.out: _out,
    aten.addmm.out: _out,
    aten.addmm_.default: _first,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward,
    aten._scaled_dot_product_flash_attention.default: _flash_on_gpu,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten.scatter_add.default: _clone_first,
    aten.index_add.default: _clone_first,
    aten.scatter.src: _clone_first,
    aten.index_copy.default: _clone_first,
    aten.scatter_.src: _first,
    aten.scatter_.value: _first,
    aten.scatter_add_.default: _first,
    aten.index_add_.default: _first,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _slice_backward,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    compat.WAIT_TENSOR: _first,
}
