"""Private torch names, each with the version range it was seen to hold for. The only file that may use one."""

import copy
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache, partial
from itertools import count
from types import MethodType, ModuleType
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode


def foreach_norm(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of each tensor in fp32, in one pass over memory (torch 2.11 to 2.14; used by clip_grad_norm_ too)."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))


def fused_adamw_(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step_count: Tensor,
    lr: Tensor,
    scale: Tensor,
    apply_update: Tensor,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """torch's one-pass AdamW on fp32 tensors (torch 2.11 to 2.14; behind torch.optim.AdamW(fused=True)).

    Gradients are multiplied by `scale` (in place); nothing changes where `ok` is false. `updates` counts this one too.
    """
    torch._fused_adamw_(
        [weight],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step_count],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=1 / scale,
        found_inf=1 - apply_update.float(),
    )


def has_fast_bf16_matmul() -> bool:
    """Whether torch has fast products in bf16 for this CPU: by instructions of its own, or from MKL."""
    mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) or mkl


def has_fused_adamw(weight: Tensor) -> bool:
    """Whether `fused_adamw_` runs where this tensor is: CPUs and GPUs, and shapes alone. Elsewhere torch has no such
    kernel, and a compiler makes one pass of the plain update."""
    return weight.is_cpu or weight.is_cuda or weight.is_meta


def add_matmul_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may be fp32 and the others bf16: summed in the product's own last step, so that the
    product is never rounded or written (the out_dtype of addmm: GPUs, torch 2.11 to 2.14)."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def supports_zero_bubble() -> bool:
    """Whether pipelining's zero-bubble schedules work with autograd functions of one's own: seen to fail on torch 2.11
    (their nodes lack the metadata it asks for) and to work on 2.13."""
    return TORCH_VERSION >= (2, 13)


def supports_unsorted_groups() -> bool:
    """Whether a process group can have its ranks in another order than their numbers: torch 2.13, not 2.11."""
    return TORCH_VERSION >= (2, 13)


def new_unsorted_group(ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    """A process group whose ranks keep their order (`sort_ranks`: torch 2.13 and 2.14)."""
    return dist.new_group(ranks, timeout=timeout, sort_ranks=False)


def init_fake_process_group(backend: str, rank: int, world_size: int) -> None:
    """This process as one of many that do not exist: groups are made, messages go nowhere (torch 2.11 to 2.14)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)


# Looking on while torch works (torch 2.11 to 2.14): a mode that is handed every operator, below autograd.

DispatchMode = TorchDispatchMode


def last_forward_node_id() -> int:
    """The number of the node that autograd made last in this thread: while an operator runs forward, its own."""
    return torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]


def current_backward_node_id() -> int | None:
    """The number of the node that runs backward now; None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def completed_work() -> Any:
    """What a message gives that went nowhere."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


def register_device_module(name: str) -> None:
    """Let torch.utils.checkpoint find a module for a device that brings none (torch 2.9, for torch_xla). Nothing in it
    is asked for as long as no random state is kept."""
    if not hasattr(torch, name):
        torch._register_device_module(name, ModuleType(f"torch.{name}"))  # type: ignore[no-untyped-call]


# Functional collectives on plain local tensors (torch 2.11 to 2.14). Each starts the work and gives a tensor that must
# go through `wait` before it is read, so that the caller decides what overlaps.


def all_reduce(x: Tensor, group: str, op: str = "sum") -> Tensor:
    return torch.ops._c10d_functional.all_reduce(x.contiguous(), op, group)


def all_reduce_(x: Tensor, group: str) -> Tensor:
    """In place, on a contiguous tensor."""
    return torch.ops._c10d_functional.all_reduce_(x, "sum", group)


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """[n, ...] on each of `size` ranks to [size * n, ...], in the order of ranks."""
    if not _emulate_with_all_reduce(x):
        return torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group)
    out = x.new_zeros(size, *x.shape)
    out[group_rank(group)] = x
    wait(all_reduce_(out.view(-1).view(torch.uint8), group))  # bytes and zeros: bits stay as they are
    return out.flatten(0, 1)


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """[size * n, ...] to this rank's [n, ...] of the sum."""
    if not _emulate_with_all_reduce(x):
        return torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group)
    return wait(all_reduce(x, group)).chunk(size)[group_rank(group)].clone()


def _emulate_with_all_reduce(x: Tensor) -> bool:
    """Whether ranks gather and scatter by plain sums: on a CPU, outside compiled code (whose graph must not know the
    rank). With gloo's own gathers and scatters under way its threads corrupted memory or hung, once in some ten
    thousand (torch 2.13 and 2.14); sums never did."""
    return x.is_cpu and not torch.compiler.is_compiling()


def sendrecv(x: Tensor, destination: int, source: int, size: int, group: str) -> Tensor:
    """Send `x` to rank `to` of the group and get the same shape from rank `source`."""
    flat = x.contiguous().view(-1)
    send, receive = [0] * size, [0] * size
    send[destination] = receive[source] = flat.numel()
    return torch.ops._c10d_functional.all_to_all_single(flat, receive, send, group)


def wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


def group_rank(group: str) -> int:
    """This process's rank in the group of that name (torch 2.11 to 2.14; what functional collectives resolve by)."""
    return torch._C._distributed_c10d._resolve_process_group(cast(Any, group)).rank()


# torch's fused attention kernels with their log-sum-exp, behind scaled_dot_product_attention (torch 2.11 to 2.14).
# Queries [B, H, T, K], keys and values [B, G, S, K] with G a divisor of H, the last dim without gaps; log-sum-exp
# [B, H, T] in fp32; bias [B, 1, T, S]. A backward takes `out` and `lse` over more keys than it is given, and then gives
# these keys' part of the gradients: it makes weights again as exp(score - lse), and all else it needs is the row sum of
# dout * out.


class AttentionKernel(NamedTuple):
    forward: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], tuple[Tensor, Tensor]]
    """(q, k, v, causal, bias) to out and lse. `causal` is for as many queries as keys and no bias."""
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, Tensor | None], tuple[Tensor, Tensor, Tensor]
    ]
    """(dout, q, k, v, out, lse, causal, bias) to the gradients of q, k and v."""


def select_attention_kernel(q: Tensor, k: Tensor, causal: bool, has_bias: bool) -> AttentionKernel | None:
    """The kernel that scaled_dot_product_attention would take here, if it is one that gives its log-sum-exp."""
    if q.is_cuda and (q.shape[-1] % 8 or q.shape[2] == k.shape[2] == 1):
        return None  # the first is padded before the kernel is called, the second refused when it is
    bias = q.new_empty(k.shape[2]).expand(*q.shape[:3], -1) if has_bias else None
    # As if for training: some kernels have no backward for what their forward takes.
    choice = torch._fused_sdp_choice(q.detach().requires_grad_(), k, k, bias, 0.0, causal, enable_gqa=True)
    return _ATTENTION_KERNELS.get((q.is_cuda, choice))


def _flash_on_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias)


def _flash_on_cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    assert bias is None
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    assert bias is None
    state = torch.empty(0, dtype=torch.uint64, device=q.device)  # of dropout
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, state, state
    )


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    bias = None if bias is None else bias.expand(-1, q.shape[1], -1, -1)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal)
    return out, lse.squeeze(-1)


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    bias = None if bias is None else bias.expand(-1, q.shape[1], -1, -1)
    lse, state = lse.contiguous().unsqueeze(-1), torch.empty(0, dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, state, state, bias, None, None, q.shape[2], k.shape[2], 0.0, causal
    )


_ATTENTION_KERNELS = {
    (False, SDPBackend.FLASH_ATTENTION.value): AttentionKernel(_flash_on_cpu, _flash_on_cpu_backward),
    (True, SDPBackend.FLASH_ATTENTION.value): AttentionKernel(_flash, _flash_backward),
    (True, SDPBackend.CUDNN_ATTENTION.value): AttentionKernel(_cudnn, _cudnn_backward),
}


def scaled_mm(
    left: Tensor, right: Tensor, left_inverse: Tensor, right_inverse: Tensor, bias: Tensor | None, fast_accum: bool
) -> Tensor:
    """left @ right of fp8 matrices times their inverse scales, plus bias, in bf16 (seen with torch 2.13 on a CPU).

    `left` has its rows in one piece and `right` its columns, of multiples of 16. Scales are fp32, [1, 1] both or [M, 1]
    and [1, N]. Not both in e5m2. `fast` is less exact: sums stay in the tensor cores' 22 bits.
    """
    return torch._scaled_mm(
        left,
        right,
        scale_a=left_inverse,
        scale_b=right_inverse,
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast_accum,
    )


# Compiling ahead (torch 2.11 to 2.14, seen on 2.13): a step runs on tensors without memory, and inductor's compiler is
# asked for each graph as in a run. What it makes is kept, and never called: it would write to no memory.


def register_group_name(name: str, group: dist.ProcessGroup) -> str:
    """Let functional collectives find this group by `name` too. torch numbers groups, so that ranks of one stage would
    have different graphs; by a name of ours they have the same. Where other ranks have the name, as in an earlier
    Trainer of this process, the next one that is free is given."""
    ranks = dist.get_process_group_ranks(group)
    for number in count(1):
        each: Any = name if number == 1 else f"{name}.{number}"
        try:
            there = torch._C._distributed_c10d._resolve_process_group(each)
        except RuntimeError:
            torch._C._distributed_c10d._register_process_group(each, group)
            return str(each)
        if dist.get_process_group_ranks(there) == ranks:
            return str(each)
    raise AssertionError


class CompileCounts(NamedTuple):
    graphs_compiled: int
    cache_hits: int
    compile_seconds: float
    """In the compiler, loading from its cache included."""


def compile_counts() -> CompileCounts:
    """Graphs that this process has compiled and found in inductor's cache so far."""
    from torch._dynamo.utils import compilation_time_metrics, counters

    found = counters["inductor"]
    compiled = found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"]
    return CompileCounts(
        compiled, found["fxgraph_cache_hit"], sum(compilation_time_metrics.get("fx_codegen_and_compile", []))
    )


def fake_tensor_mode() -> Any:
    """A mode in which every tensor has a device, a shape and no memory; what has no rule for that is answered here. No
    class of ours: torch keeps rules of some operators by the class of the mode."""
    from torch._C._distributed_c10d import FakeWork
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    rest = mode.__torch_dispatch__

    def dispatch(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._fused_adamw_.tensor_lr:
            return None
        if function is torch.ops.aten.addmm.dtype_out:  # torch's rule takes its dtype for a factor (seen with 2.11)
            return kwargs["out"]
        if function is torch.ops.aten._local_scalar_dense.default:
            # Made of a number, it is that number: torch compares floats by way of tensors to see whether a graph fits.
            known = args[0].constant if isinstance(args[0], FakeTensor) else None
            return known.item() if known is not None else 1.0 if args[0].dtype.is_floating_point else 1
        if function.namespace == "c10d":  # messages go nowhere
            work = FakeWork().boxed()
            return work if len(function._schema.returns) == 1 else (args[0], work)
        return rest(function, types, args, kwargs)

    mode.__torch_dispatch__ = MethodType(dispatch, mode)  # type: ignore[method-assign]
    return mode


def disable_fake_tensors() -> AbstractContextManager[Any]:
    """Tensors with memory, even inside `shapes_only`."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


class GraphNotCompiled(BaseException):
    """A graph was not in the cache and is not compiled here. No Exception: inductor would make another one of it."""


class GraphRequest(NamedTuple):
    """A graph that inductor was asked for."""

    cache_key: str
    """In inductor's cache; empty where there was nothing to compile."""
    origin: str
    """File and function that most of it comes from."""
    is_backward: bool


@contextmanager
def intercept_compilation(
    on_miss: Callable[[GraphRequest, Callable[[], Any]], Any], on_hit: Callable[[GraphRequest], None]
) -> Iterator[None]:
    """Inside, torch.compile gives functions that only work on shapes. `miss` is called for a graph that is not in
    inductor's cache, with what would compile it, and gives what that gives or raises Unmade; `found` for a graph that
    is in the cache now."""
    from torch._dynamo import config
    from torch._inductor import codecache, compile_fx
    from torch._inductor.output_code import CompiledFxGraph
    from torch._subclasses.fake_tensor import FakeTensor

    whole, one, make = compile_fx.compile_fx, compile_fx.compile_fx_inner, compile_fx.fx_codegen_and_compile

    def codegen(graph: Any, inputs: Any, checked: Any, *rest: Any, **options: Any) -> Any:
        key, _ = codecache.compiled_fx_graph_hash(graph, inputs, cast(Any, options), checked)
        asked = GraphRequest(key, _graph_origin(graph), bool(options.get("is_backward")))
        return on_miss(asked, lambda: make(graph, inputs, checked, *rest, **options))

    def inner(graph: Any, inputs: Any, **options: Any) -> Any:
        kept = copy.deepcopy(graph)

        def run(tensors: list[Any]) -> Any:
            out = kept(*tensors)
            tensors.clear()
            return out

        run._boxed_call = True  # type: ignore[attr-defined]
        try:
            compiled = one(graph, inputs, **options)
        except GraphNotCompiled:
            return run
        key = getattr(compiled, "_fx_graph_cache_key", None) or ""
        on_hit(GraphRequest(key, _graph_origin(kept), bool(options.get("is_backward"))))
        if isinstance(compiled, CompiledFxGraph):
            compiled.current_callable = run
        return compiled

    def outer(model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        # Autograd's key holds the types of a graph's inputs: those that they have in a run.
        for node, value in zip(model.graph.find_nodes(op="placeholder"), inputs, strict=False):
            if node.type is FakeTensor:
                node.type = torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else Tensor
        model.recompile()
        return whole(model, inputs, *rest, **{"inner_compile": inner, **options})

    # torch gives up on a function after eight graphs: in a run a sign of trouble, here of many layers.
    many = config.patch(recompile_limit=UNLIMITED_RECOMPILES, accumulated_recompile_limit=UNLIMITED_RECOMPILES)
    with patch.multiple(compile_fx, compile_fx=outer, fx_codegen_and_compile=codegen), many:
        yield


def _graph_origin(graph: Any) -> str:
    """By what the nodes say they come from: the outermost frame of each, the most frequent one."""
    frames = [_FRAME.search(node.meta.get("stack_trace") or "") for node in graph.graph.nodes]
    names = [f"{frame[1]}.{frame[2]}" for frame in frames if frame]
    return max(set(names), key=names.count) if names else "?"


UNLIMITED_RECOMPILES = 1 << 20
_FRAME = re.compile(r'File ".*?([^/]+)\.py", line \d+, in (\w+)')


def lower_for_strides(compile_graph: Callable[[], Any]) -> None:
    """As much of compiling a graph as says how its outputs lie in memory, which the backward pass depends on."""
    from torch._inductor.graph import GraphLowering

    def strides(graph: Any) -> None:
        context = torch._guards.TracingContext.try_get()
        if context is not None and context.output_strides is not None:
            outputs = [out.get_layout().stride if hasattr(out, "get_layout") else None for out in graph.graph_outputs]
            if all(out is None or all(str(size).isdigit() for size in out) for out in outputs):
                context.output_strides += [out and tuple(int(size) for size in out) for out in outputs]
        raise GraphNotCompiled

    with patch.object(GraphLowering, "compile_to_module", strides):
        compile_graph()


def probe_cpu_isa() -> None:
    """Let inductor find out which instructions this CPU has, by a dozen small libraries that it then keeps."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    pick_vec_isa()


@contextmanager
def disable_autograd_cache() -> Iterator[None]:
    """Only inductor's own cache is asked."""
    from torch._functorch import config

    with config.patch(enable_autograd_cache=False):
        yield


@contextmanager
def write_only_autograd_cache() -> Iterator[None]:
    """Written and never read: what is found there would be called, and has no memory to work on. torch 2.11 was seen to
    ask for one graph several times in a trace."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    with patch.object(AOTAutogradCache, "_lookup", staticmethod(lambda *asked, **also: None)):
        yield


def disable_automatic_dynamic_shapes() -> None:
    """From now on a graph of dynamic shapes does not depend on which lengths were met before it was asked for: torch
    gives equal lengths one symbol, unless an earlier graph of the same function has seen another."""
    from torch._dynamo import config

    config.automatic_dynamic_shapes = False


def default_inductor_dir() -> str:
    """Where inductor keeps what it compiles, unless told."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


@cache
def install_atomic_cpp_builds() -> None:
    """From now on inductor's C++ compiler writes under another name, and what it wrote gets its own when it is whole: a
    killed compiler was seen to leave half a library, which every later run then failed to load."""
    from torch._inductor import codecache, cpp_builder

    cpp_builder.run_compile_cmd = partial(_run_compiler_atomically, cpp_builder.run_compile_cmd)
    codecache._worker_compile_cpp = _worker_compile_cpp_atomically


def _run_compiler_atomically(run: Callable[[str, str], None], command: str, cwd: str) -> None:
    words = shlex.split(command)
    at = words.index("-o") + 1 if "-o" in words[:-1] else 0
    if not at:
        run(command, cwd)
        return
    target, part = words[at], f"{words[at]}.{os.getpid()}.part"
    try:
        run(shlex.join([*words[:at], part, *words[at + 1 :]]), cwd)
        os.replace(part, target)
    finally:
        if os.path.exists(part):
            os.unlink(part)


def _worker_compile_cpp_atomically(lock_path: str, cpp_builders: Any) -> None:
    """inductor's own of that name, but also whole in its worker processes, which get it by its name."""
    from torch._inductor import codecache
    from torch.utils._filelock import FileLock

    install_atomic_cpp_builds()
    with FileLock(lock_path, timeout=codecache.LOCK_TIMEOUT):
        for builder in cpp_builders:
            if not os.path.exists(builder.get_target_file_path()):
                builder.build()
