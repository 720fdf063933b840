"""Inductor: counters, the cache directory, and tracing of graphs without running them (torch 2.11 to 2.14).

Tracing goes through entry points that torch offers to backends: `torch.compile(backend=...)` and the `inner_compile`
argument of `compile_fx`. Two functions of inductor are replaced for its duration (and `has_recomputable_rng_ops` of the
partitioner whenever blocks are compiled), because there is no hook at these points:

- `compile_fx.fx_codegen_and_compile`, which inductor calls when it has missed its cache, with everything that its cache
  key depends on. Computing that key outside would repeat the defaults of `compile_fx_inner`, which change.
- `GraphLowering.compile_to_module`, the point where the strides of a graph's outputs are known (the backward graph
  depends on them) but no code has been compiled.
"""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor

UNLIMITED_RECOMPILES = 1 << 20
_FRAME = re.compile(r'File ".*?([^/]+)\.py", line \d+, in (\w+)')


class CompileCounts(NamedTuple):
    """Graphs of this process so far."""

    graphs_compiled: int
    cache_hits: int
    compile_seconds: float
    """Time in the compiler, including loads from its cache."""


def compile_counts() -> CompileCounts:
    """Read inductor's counters."""
    from torch._dynamo.utils import compilation_time_metrics, counters

    counts = counters["inductor"]
    compiled = counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]
    seconds = sum(compilation_time_metrics.get("fx_codegen_and_compile", []))
    return CompileCounts(compiled, counts["fxgraph_cache_hit"], seconds)


def on_compile(started: Callable[[], None], ended: Callable[[], None]) -> Callable[[], None]:
    """Call `started` and `ended` around each compilation of this process (torch 2.9 to 2.14). Returns a function that
    ends that."""
    from torch._dynamo.callback import callback_handler

    first = callback_handler.register_start_callback(lambda *args: started())
    last = callback_handler.register_end_callback(lambda *args: ended())

    def remove() -> None:
        callback_handler.remove_start_callback(first)
        callback_handler.remove_end_callback(last)

    return remove


class GraphNotCompiled(BaseException):
    """A graph is not in the cache and is not compiled here. Not an Exception, which inductor would wrap."""


class GraphRequest(NamedTuple):
    """A graph that inductor was asked to compile."""

    cache_key: str
    """Key in inductor's cache; empty if there was nothing to compile."""
    origin: str
    """File and function that most of its nodes come from."""
    is_backward: bool
    key_parts: tuple[str, ...] = ()
    """What the key is computed from, one line each; empty for a graph that was found."""


class TracingBackend:
    """A torch.compile backend that asks inductor for every graph of a step exactly as a run does, but returns functions
    that only propagate shapes: compiled code would write to memory that fake tensors do not have."""

    def __init__(
        self,
        on_graph: Callable[[], None],
        on_miss: Callable[[GraphRequest, Callable[[], Any]], Any],
        on_hit: Callable[[GraphRequest], None],
    ) -> None:
        self.on_graph = on_graph
        """Called before each graph."""
        self.on_miss = on_miss
        """Called for a graph that is not in inductor's cache, with a function that compiles it. Returns what that
        function returns, or raises GraphNotCompiled."""
        self.on_hit = on_hit
        """Called for a graph that is in the cache."""

    def __call__(self, model: Any, inputs: Any, *, mode: str = "default", options: dict[str, Any] | None = None) -> Any:
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx
        from torch._subclasses.fake_tensor import FakeTensor

        self.on_graph()
        # The key of the autograd cache contains the types of the inputs: use those of a run.
        for node, value in zip(model.graph.find_nodes(op="placeholder"), inputs, strict=False):
            if node.type is FakeTensor:
                node.type = torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else Tensor
        model.recompile()
        config = {**list_mode_options(mode), **(options or {})}
        return compile_fx(model, inputs, inner_compile=self._compile_inner, config_patches=config)

    @contextmanager
    def active(self) -> Iterator[None]:
        """While active, a cache miss in inductor calls `on_miss`."""
        from torch._dynamo import config
        from torch._inductor import codecache, compile_fx

        codegen = compile_fx.fx_codegen_and_compile

        def intercept(graph: Any, inputs: Any, inputs_to_check: Any, *args: Any, **options: Any) -> Any:
            key, parts = codecache.compiled_fx_graph_hash(graph, inputs, cast(Any, options), inputs_to_check)
            request = GraphRequest(key, _graph_origin(graph), bool(options.get("is_backward")), tuple(parts))
            return self.on_miss(request, lambda: codegen(graph, inputs, inputs_to_check, *args, **options))

        # dynamo gives up on a function after eight graphs, which in a trace of many layers is normal.
        limits = config.patch(recompile_limit=UNLIMITED_RECOMPILES, accumulated_recompile_limit=UNLIMITED_RECOMPILES)
        with patch.object(compile_fx, "fx_codegen_and_compile", intercept), limits:
            yield

    def _compile_inner(self, graph: Any, inputs: Any, **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.output_code import CompiledFxGraph

        eager = copy.deepcopy(graph)

        def run(tensors: list[Any]) -> Any:
            out = eager(*tensors)
            tensors.clear()
            return out

        run._boxed_call = True  # type: ignore[attr-defined]
        try:
            compiled = compile_fx_inner(graph, inputs, **options)
        except GraphNotCompiled:
            return run
        key = getattr(compiled, "_fx_graph_cache_key", None) or ""
        self.on_hit(GraphRequest(key, _graph_origin(eager), bool(options.get("is_backward"))))
        if isinstance(compiled, CompiledFxGraph):
            compiled.current_callable = run
        return compiled


def _graph_origin(graph: Any) -> str:
    """The most frequent outermost stack frame of the nodes."""
    frames = [_FRAME.search(node.meta.get("stack_trace") or "") for node in graph.graph.nodes]
    names = [f"{frame[1]}.{frame[2]}" for frame in frames if frame]
    return max(set(names), key=names.count) if names else "?"


def lower_for_strides(compile_graph: Callable[[], Any]) -> None:
    """Run the part of a compilation that determines the strides of the outputs, which the backward graph depends on.
    Raises GraphNotCompiled at its end."""
    from torch._inductor.graph import GraphLowering

    def record_strides(graph: Any) -> None:
        context = torch._guards.TracingContext.try_get()
        if context is not None and context.output_strides is not None:
            strides = [out.get_layout().stride if hasattr(out, "get_layout") else None for out in graph.graph_outputs]
            if all(stride is None or all(str(step).isdigit() for step in stride) for stride in strides):
                context.output_strides += [stride and tuple(int(step) for step in stride) for stride in strides]
        raise GraphNotCompiled

    with patch.object(GraphLowering, "compile_to_module", record_strides):
        compile_graph()


def probe_cpu_isa() -> None:
    """Let inductor detect the CPU's instruction set, for which it compiles and caches a dozen small libraries."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    pick_vec_isa()


@contextmanager
def disable_autograd_cache() -> Iterator[None]:
    """Use only inductor's own cache."""
    from torch._functorch import config

    with config.patch(enable_autograd_cache=False):
        yield


def disable_automatic_dynamic_shapes() -> None:
    """Make dynamic graphs independent of the lengths seen earlier: torch gives equal lengths one symbol, unless an
    earlier graph of the same function has seen them differ."""
    from torch._dynamo import config

    config.automatic_dynamic_shapes = False


def allow_recompiles(count: int) -> None:
    """Let one function have `count` graphs; beyond its limit, torch silently runs it without compilation."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)


def skip_rng_state_of_attention() -> None:
    """Recompute attention without saving torch's random state first, where it has no dropout and draws no numbers.

    torch saves the state for every recomputed operator that can draw random numbers. The length of the saved state
    becomes a symbol whose name depends on what else the process has traced, and with it the graph's key in the cache: a
    run would not find what was compiled ahead of time."""
    from torch._functorch import partitioners

    def has_recomputed_random_ops(fx_g: Any) -> bool:
        return any(partitioners.must_recompute(node) and _draws_random_numbers(node) for node in fx_g.graph.nodes)

    partitioners.has_recomputable_rng_ops = has_recomputed_random_ops


def _draws_random_numbers(node: Any) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    index = names.index("dropout_p")
    dropout = node.args[index] if index < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(dropout != 0)


def default_inductor_dir() -> str:
    """Inductor's cache directory if TORCHINDUCTOR_CACHE_DIR is not set."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()
