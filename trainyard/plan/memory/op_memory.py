"""Memory of the operations that models are made of: `models/layers/`, `parallel/tensor_parallel.py`, `kernels/`.

Reference kernels save what torch's autograd saves for each of their small operations; fused kernels save what their own
code names. Figures that are not the size of a tensor in the code were read off a CPU's allocator, as
docs/lab/memory-evidence.md describes.

Shapes: t tokens of a micro batch on this rank, s tokens between attention and MLP (fewer than t under sequence
parallelism), D hidden, F ffn.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trainyard.config.schema import RecomputeSection
from trainyard.core.constants import MAX_REDUCTION_PROGRAMS
from trainyard.parallel.attention_blocks import TILE_BYTES
from trainyard.plan.memory.liveness import OpMemory, grad_name
from trainyard.plan.memory.local_sizes import RankSizes


class OpMemoryBuilder:
    """Records operations. Methods take and return names of tensors where a model's modules take and return tensors."""

    def __init__(self, sizes: RankSizes, recompute: RecomputeSection) -> None:
        self.sizes, self.recompute_block = sizes, recompute.kind == "full"
        is_attention = recompute.kind == "attention"
        self.recompute_modules: tuple[str, ...] = ("core_attention",) if is_attention else tuple(recompute.modules)
        self.recorded: list[OpMemory] = []
        self.nbytes: dict[str, int] = {}
        """Size of each tensor."""
        self.layer = -1
        self.fp8 = ""
        """`precision.fp8_backward` inside a layer that computes in fp8, else empty."""
        self.scopes: tuple[str, ...] = ()
        """Modules that contain the next operation, outermost first, named as `recompute.modules` names them."""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        outer, self.scopes = self.scopes, (*self.scopes, name)
        yield
        self.scopes = outer

    @property
    def recompute_group(self) -> tuple[object, ...]:
        """What is recomputed together with the next operation: the block or the outermost module."""
        if self.layer < 0:
            return ()
        if self.recompute_block:
            return (self.layer,)
        depth = next((depth for depth, scope in enumerate(self.scopes, 1) if scope in self.recompute_modules), 0)
        return (self.layer, *self.scopes[:depth]) if depth else ()

    def record(
        self,
        inputs: tuple[str, ...],
        outputs: Mapping[str, int],
        saved: tuple[str, ...] = (),
        forward_workspace: int = 0,
        backward_workspace: int = 0,
        views: Mapping[str, tuple[str, int]] | None = None,
        grad_aliases: tuple[str | None, ...] = (),
    ) -> list[str]:
        """Record an `OpMemory` and return the names of its outputs and views. Labels of outputs and views, which
        `saved` and `grad_aliases` may use too, become unique names."""
        views = views or {}
        names = {label: f"{len(self.recorded)} {label}" for label in (*outputs, *views)}
        named_outputs = {names[label]: size for label, size in outputs.items()}
        named_views = {names[label]: view for label, view in views.items()}
        self.nbytes |= named_outputs | {name: size for name, (_, size) in named_views.items()}
        known = names | {grad_name(label): grad_name(name) for label, name in names.items()}
        saved = tuple(names.get(name, name) for name in saved)
        aliases = tuple(alias and known.get(alias, alias) for alias in grad_aliases)
        sizes = forward_workspace, backward_workspace
        self.recorded.append(
            OpMemory(inputs, named_outputs, saved, *sizes, named_views, aliases, self.layer, self.recompute_group)
        )
        return list(names.values())

    # Between attention and MLP.

    def _partial_sums_bytes(self, rows: int, columns: int, vectors: int = 1) -> int:
        """fp32 partial sums that the programs of a fused backward kernel leave for `vectors` gradients."""
        rows_per_program = -(-rows // MAX_REDUCTION_PROGRAMS)
        return -(-rows // rows_per_program) * vectors * columns * 4

    def residual_add(self, x: str, y: str) -> str:
        return self.record((x, y), {"sum": self.nbytes[x]}, grad_aliases=("d sum", "d sum"))[0]

    def _fused_norm(self, x: str, y: str | None, stats: int, vectors: int, shared_grad: bool) -> tuple[str, str]:
        """(x or x + y, normed) by a kernel that saves `stats` bytes and has gradients of `vectors` parameters. With
        `shared_grad` x and y have the same gradient."""
        size, partial = self.nbytes[x], self._partial_sums_bytes(self.sizes.local_tokens, self.sizes.hidden, vectors)
        outputs = {"out": size, "stats": stats}
        if y is None:
            out, _, residual = self.record((x,), outputs, (x, "stats"), 0, partial, {"residual": (x, size)})
            return residual, out
        outputs, aliases = {**outputs, "total": size}, (None, grad_name(x) if shared_grad else None)
        out, _, total = self.record((x, y), outputs, ("total", "stats"), 0, partial, grad_aliases=aliases)
        return total, out

    def rms_norm(self, x: str, y: str | None = None) -> tuple[str, str]:
        """(residual, normed), where the residual is x or x + y."""
        sizes, size, rows = self.sizes, self.nbytes[x], self.sizes.local_tokens
        fp32 = rows * sizes.hidden * 4
        with self.scope("norm"):
            if sizes.fused_kernels:
                return self._fused_norm(x, y, 4 * rows, 1, shared_grad=True)
            total = x if y is None else self.residual_add(x, y)
            if sizes.device.accumulating_gemm:
                return total, self.record((total,), {"out": size, "rstd": 4 * rows}, (total, "rstd"))[0]
            # In fp32 by single operations, which save the input and the factor of the weight.
            copies, forward, backward = (fp32, 0, 2 * fp32) if sizes.is_fp32 else (2 * fp32, fp32, 3 * fp32)
            saved = ("fp32", total) if sizes.is_fp32 else ("fp32",)
            outputs = {"out": size, "fp32": copies + 4 * rows}
            out, _ = self.record((total,), outputs, saved, forward, backward)
        return total, out

    def layer_norm(self, x: str, y: str | None = None, p: float = 0.0, post_norm: bool = False) -> tuple[str, str]:
        """(residual, normed). Pre-norm: residual = x + dropout(y + bias). Post-norm: residual = normed."""
        sizes, size, rows = self.sizes, self.nbytes[x], self.sizes.local_tokens
        with self.scope("norm"):
            if sizes.fused_kernels:
                total, out = self._fused_norm(x, y, 8 * rows, 2 if y is None else 3, shared_grad=not p)
                return (out if post_norm else total), out
            total = x if y is None else self.add_dropout(x, y, p)
            out, _ = self.record((total,), {"out": size, "mean_rstd": 8 * rows}, (total, "mean_rstd"))
        return (out if post_norm else total), out

    def dropout(self, y: str, with_bias: bool = True) -> str:
        """dropout(y + bias), or dropout(y)."""
        sizes, size = self.sizes, self.nbytes[y]
        elements = size // sizes.element_size
        if sizes.fused_kernels:
            partial = self._partial_sums_bytes(sizes.local_tokens, sizes.hidden) if with_bias else 0
            return self.record((y,), {"out": size}, (), 0, partial)[0]
        # Random numbers are int32, computed in a few steps; the mask has one byte per element.
        forward = elements * (8 if sizes.is_fp32 else 9) + (size if with_bias else 0)
        backward = elements * (3 if sizes.is_fp32 else 1)
        return self.record((y,), {"out": size, "mask": elements}, ("mask",), forward, backward)[0]

    def add_dropout(self, x: str, y: str, p: float) -> str:
        """x + dropout(y + bias)."""
        sizes, size = self.sizes, self.nbytes[x]
        if sizes.fused_kernels:
            partial = self._partial_sums_bytes(sizes.local_tokens, sizes.hidden)
            aliases = ("d sum", None if p else "d sum")
            return self.record((x, y), {"sum": size}, backward_workspace=partial, grad_aliases=aliases)[0]
        if p:
            return self.residual_add(x, self.dropout(y))
        return self.record((x, y), {"sum": size}, forward_workspace=size, grad_aliases=("d sum", "d sum"))[0]

    def concat(self, names: list[str]) -> str:
        size = sum(self.nbytes[name] for name in names)
        return self.record(tuple(names), {"concat": size}, grad_aliases=("d concat",) * len(names))[0]

    # Into and out of attention and MLP, where tensor-parallel ranks communicate.

    def linear(self, x: str, rows: int, inputs: int, outputs: int) -> str:
        """The product of [rows, inputs] and this rank's matrix."""
        sizes = self.sizes
        if self.fp8:
            return self._fp8_linear(x, rows, inputs, outputs)
        backward = 0 if sizes.fused_wgrad else outputs * inputs * sizes.element_size
        return self.record((x,), {"out": rows * outputs * sizes.element_size}, (x,), 0, backward)[0]

    def _fp8_linear(self, x: str, rows: int, inputs: int, outputs: int) -> str:
        """The transposed x is saved in 8 bits; weights and gradients are cast when they are used."""
        sizes, weight = self.sizes, inputs * outputs
        padded = -(-rows // 16) * 16
        out = {"out": rows * outputs * sizes.element_size}
        forward, backward = padded * inputs + weight, 2 * padded * outputs + weight + weight * sizes.element_size
        if not sizes.fused_kernels:  # reference kernels: casts and products go through fp32
            forward += 4 * (rows * inputs + weight + 2 * rows * outputs)
            backward += 4 * (rows * inputs + rows * outputs + weight)
        if self.fp8 == "bf16":
            return self.record((x,), out, (x,), forward, weight * sizes.element_size)[0]
        return self.record((x,), {**out, "x8": padded * inputs}, ("x8",), forward, backward)[0]

    @property
    def _reorder_bytes(self) -> int:
        """A copy that puts gathered tokens in order; a single sample needs none."""
        return self.sizes.hidden_bytes if self.sizes.samples > 1 else 0

    def column_parallel(self, x: str, *outputs: int) -> list[str]:
        """Column-parallel products with the same x."""
        sizes = self.sizes
        if sizes.sequence_parallel and not self.fp8 and not self.recompute_group:
            reorder = self._reorder_bytes
            weights = sum(outputs) * sizes.hidden * sizes.element_size
            made = {f"out{index}": sizes.tokens * width * sizes.element_size for index, width in enumerate(outputs)}
            summed = sizes.hidden_bytes if sizes.device.gathers_by_all_reduce else sizes.local_hidden_bytes
            backward = 2 * sizes.hidden_bytes + max(2 * reorder, summed) + weights
            return self.record((x,), made, (x,), sizes.hidden_bytes + reorder, backward)
        x = self.gather_tokens(x)
        return [self.linear(x, sizes.tokens, sizes.hidden, width) for width in outputs]

    def gather_tokens(self, x: str) -> str:
        """All tokens on every rank; the backward pass sums gradients."""
        sizes = self.sizes
        if sizes.tp == 1:
            return x
        if not sizes.sequence_parallel:
            return self.record((x,), {}, backward_workspace=self.nbytes[x], views={"same": (x, self.nbytes[x])})[0]
        reorder = self._reorder_bytes
        backward = reorder + (sizes.hidden_bytes if sizes.device.gathers_by_all_reduce else 0)
        return self.record((x,), {"gathered": sizes.hidden_bytes}, (), reorder, backward)[0]

    def reduce_output(self, x: str) -> str:
        """The sum over ranks after a row-parallel product; under sequence parallelism each rank keeps its tokens."""
        sizes = self.sizes
        if sizes.tp == 1:
            return x
        if not sizes.sequence_parallel:
            return self.record((x,), {"sum": self.nbytes[x]}, grad_aliases=("d sum",))[0]
        reorder = self._reorder_bytes
        forward = reorder + (sizes.hidden_bytes if sizes.device.gathers_by_all_reduce else 0)
        return self.record((x,), {"sum": sizes.local_hidden_bytes}, (), forward, reorder)[0]

    # Inside attention and MLP.

    def rope(self, qkv: str) -> tuple[str, str, str]:
        sizes = self.sizes
        q, k = (sizes.tokens * heads * sizes.head_size * sizes.element_size for heads in (sizes.heads, sizes.kv_heads))
        forward = backward = 0
        if not sizes.fused_kernels:  # rotated in fp32, one half at a time
            forward, backward = (2 * q - k, 2 * q - k) if sizes.is_fp32 else (7 * q - k, 6 * q - k)
        q_out, k_out, v_out = self.record((qkv,), {"q": q, "k": k}, (), forward, max(backward, 0), {"v": (qkv, k)})
        return q_out, k_out, v_out

    def attention(self, q: str, k: str, v: str, p: float = 0.0) -> str:
        """Attention with dropout `p` of its weights."""
        sizes = self.sizes
        out = sizes.tokens * sizes.heads * sizes.head_size * sizes.element_size
        lse = 4 * sizes.tokens * sizes.heads
        scores = sizes.tokens * sizes.seq_len * sizes.heads
        if sizes.cp > 1 or sizes.document_mask:
            return self._context_attention(q, k, v, out, lse, p)
        with self.scope("core_attention"):
            if p:
                # Saved: the softmax in fp32, the mask (a byte per score) and the weights in the compute dtype.
                saved = scores * (9 if sizes.is_fp32 else 7)
                forward, backward = (scores * 12, scores * 3) if sizes.is_fp32 else (scores * 14, scores * 6)
                outputs = {"out": out, "weights": saved}
                return self.record((q, k, v), outputs, (q, k, v, "weights"), forward, backward)[0]
            if sizes.is_fp32 and not sizes.device.gqa_fp32 and sizes.kv_heads != sizes.heads:
                k, v = (self.record((name,), {"per_head": out})[0] for name in (k, v))  # copied for each query head
            return self.record((q, k, v), {"out": out, "lse": lse}, (q, k, v, "out", "lse"))[0]

    def _context_attention(self, q: str, k: str, v: str, out: int, lse: int, p: float) -> str:
        """Attention by blocks, merged in fp32. Keys and values of other ranks arrive during the computation."""
        sizes = self.sizes
        fp32 = out * 4 // sizes.element_size
        kv = 2 * sizes.tokens * sizes.kv_heads * sizes.head_size * sizes.element_size
        kv_fp32 = kv * 4 // sizes.element_size
        if sizes.cp > 1:
            received = kv * (sizes.cp + 1 if sizes.cp_all_gather else 2)
            backward = fp32 * 2 + kv_fp32 * ((2 * sizes.cp) if sizes.cp_all_gather else 3) + received
        else:
            received, backward = 0, fp32 * 2 + kv_fp32
        tiles = 4 * TILE_BYTES if p else TILE_BYTES if sizes.document_mask else 0
        smallest = 4 * sizes.heads * sizes.seq_len * sizes.cp
        tiles = min(tiles, 4 * max(smallest, sizes.tokens * sizes.seq_len * sizes.cp * 4 * sizes.heads))
        with self.scope("core_attention" if sizes.cp == 1 else "ring"):
            outputs, saved, forward = {"out": out, "lse": lse}, (q, k, v, "out", "lse"), 2 * fp32 + received + tiles
            return self.record((q, k, v), outputs, saved, forward, backward + tiles)[0]

    def qkv_attention(self, projections: list[str], p: float, packed: bool) -> str:
        """Attention on one fused or three separate projections with equal head counts. A fused kernel serves packed
        batches and dropout."""
        sizes = self.sizes
        size = sizes.tokens * sizes.heads * sizes.head_size * sizes.element_size
        lse = 4 * sizes.tokens * sizes.heads
        if packed or (sizes.fused_kernels and p and sizes.cp == 1 and not sizes.document_mask):
            qkv = projections[0] if len(projections) == 1 else self.record(tuple(projections), {"qkv": 3 * size})[0]
            with self.scope("core_attention"):
                return self.record((qkv,), {"out": size, "lse": lse}, (qkv, "out", "lse"), 0, lse)[0]
        if len(projections) == 1:
            projections = self.record((projections[0],), {}, views=dict.fromkeys("qkv", (projections[0], size)))
        q, k, v = projections
        return self.attention(q, k, v, p)

    def swiglu(self, gate_up: str) -> str:
        half = self.nbytes[gate_up] // 2
        with self.scope("activation"):
            if self.sizes.fused_kernels:
                return self.record((gate_up,), {"out": half}, (gate_up,))[0]
            return self.record((gate_up,), {"out": half, "silu": half}, (gate_up, "silu"), 0, half)[0]

    def gelu(self, x: str, rows: int, columns: int) -> str:
        """GELU(x + bias)."""
        size = self.nbytes[x]
        with self.scope("activation"):
            if self.sizes.fused_kernels:
                return self.record((x,), {"out": size}, (x,), 0, self._partial_sums_bytes(rows, columns))[0]
            return self.record((x,), {"out": size, "biased": size}, ("biased",))[0]
