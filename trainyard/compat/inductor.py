"""Inductor: counters, cache directory, tracing of graphs without running them, and atomic C++ builds.

Holds for torch 2.11 to 2.14.
"""

import copy
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor


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
