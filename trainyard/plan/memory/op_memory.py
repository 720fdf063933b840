"""What the pieces of a model make and keep, byte by byte: the operations of `models/layers.py`,
`parallel/tensor_parallel.py`
and `kernels/` as rows of a `Tape`.

Plain kernels keep what torch's autograd keeps for each of their small operations; fused ones what they say themselves.
Where a figure is not a tensor one can name in the code, it was read off a CPU's allocator (docs/memory.md says how).

Shapes in names: t all tokens of a micro batch on this rank, s those that it holds between the parts of a block (fewer
under sequence parallelism), D hidden, F ffn.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trainyard.parallel.attention_blocks import TILE_BYTES
from trainyard.plan.memory.liveness import OpMemory, grad_name
from trainyard.plan.memory.local_sizes import RankSizes

TRITON_PROGRAMS = 2112
"""As kernels/triton/column_sums.py, which needs Triton: partial sums of a vector's gradient, at most so many."""


class OpMemoryBuilder:
    """Writes down operations. Methods take and give names of tensors, as the model's modules do tensors."""

    def __init__(self, sizes: RankSizes) -> None:
        self.sizes = sizes
        self.recorded: list[OpMemory] = []
        self.nbytes: dict[str, int] = {}
        self.layer = -1
        self.fp8: str = ""
        """As `Run.fp8`, inside a block that multiplies so."""
        self.scopes: tuple[str, ...] = ()
        self.keep_gathered: frozenset[str] = frozenset()
        """Parts that are recomputed, and so may keep what they gathered."""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        before, self.scopes = self.scopes, (*self.scopes, name)
        yield
        self.scopes = before

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
        """Labels in `makes`, `keeps` and `views` become names; gives those of what is made, and of views."""
        views = views or {}
        label = {key: f"{len(self.recorded)} {key}" for key in (*outputs, *views)}
        made = {label[key]: size for key, size in outputs.items()}
        seen = {label[key]: of for key, of in views.items()}
        self.nbytes |= made | {name: size for name, (_, size) in seen.items()}
        kept = tuple(label.get(name, name) for name in saved)
        own = label | {grad_name(key): grad_name(name) for key, name in label.items()}
        shared = tuple(None if of is None else own.get(of, of) for of in grad_aliases)
        self.recorded.append(
            OpMemory(inputs, made, kept, forward_workspace, backward_workspace, seen, shared, self.scopes, self.layer)
        )
        return list(label.values())

    # Between the parts of a block.

    @property
    def local_hidden_bytes(self) -> int:
        """Bytes of [s, D]."""
        return self.sizes.local_tokens * self.sizes.hidden * self.sizes.element_size

    @property
    def hidden_bytes(self) -> int:
        """Bytes of [t, D]."""
        return self.sizes.tokens * self.sizes.hidden * self.sizes.element_size

    def _partial_sums_bytes(self, rows: int, columns: int, kinds: int = 1) -> int:
        """fp32 sums that programs of a fused backward pass leave."""
        each = -(-rows // TRITON_PROGRAMS)
        return -(-rows // each) * kinds * columns * 4

    def residual_add(self, x: str, y: str) -> str:
        return self.record((x, y), {"sum": self.nbytes[x]}, grad_aliases=("d sum", "d sum"))[0]

    def rms_norm(self, x: str, y: str | None = None) -> tuple[str, str]:
        r, size = self.sizes, self.nbytes[x]
        rows, fp32 = r.local_tokens, r.local_tokens * r.hidden * 4
        with self.scope("norm"):
            if r.fused_kernels:
                partial = self._partial_sums_bytes(rows, r.hidden)
                if y is None:
                    out, _, on = self.record(
                        (x,), {"out": size, "inverse": 4 * rows}, (x, "inverse"), 0, partial, {"on": (x, size)}
                    )
                    return on, out
                total, out, _ = self.record(
                    (x, y), {"total": size, "out": size, "inverse": 4 * rows}, ("total", "inverse"), 0, partial,
                    grad_aliases=(None, grad_name(x)),
                )  # fmt: skip
                return total, out
            total = x if y is None else self.residual_add(x, y)
            if r.accumulating_gemm:
                return total, self.record((total,), {"out": size, "inverse": 4 * rows}, (total, "inverse"))[0]
            # In fp32 by single operations: its input and what the weight multiplies are kept.
            copies = fp32 if r.is_fp32 else 2 * fp32
            kept = ("wide", total) if r.is_fp32 else ("wide",)
            out, _ = self.record(
                (total,), {"out": size, "wide": copies + 4 * rows}, kept, 0 if r.is_fp32 else fp32,
                2 * fp32 if r.is_fp32 else 3 * fp32,
            )  # fmt: skip
        return total, out

    def layer_norm(self, x: str, y: str | None = None, p: float = 0.0, post_norm: bool = False) -> tuple[str, str]:
        """x + dropout(y + bias), or `after` it the norm of that; and the norm."""
        r, size, rows = self.sizes, self.nbytes[x], self.sizes.local_tokens
        with self.scope("norm"):
            if r.fused_kernels:
                partial = self._partial_sums_bytes(rows, r.hidden, 2 if y is None else 3)
                made = {"out": size, "each": 8 * rows}
                if y is None:
                    out, _, on = self.record((x,), made, (x, "each"), 0, partial, {"on": (x, size)})
                    return on, out
                out, _, total = self.record(
                    (x, y),
                    {**made, "total": size},
                    ("total", "each"),
                    0,
                    partial,
                    grad_aliases=(None, None if p else grad_name(x)),
                )
                return (out if post_norm else total), out
            total = x if y is None else self.add_dropout(x, y, p)
            out, _ = self.record((total,), {"out": size, "each": 8 * rows}, (total, "each"))
        return (out if post_norm else total), out

    def dropout(self, y: str, p: float, with_bias: bool = True) -> str:
        """dropout(y + bias) alone."""
        r, size = self.sizes, self.nbytes[y]
        numbers = size // r.element_size
        if r.fused_kernels:
            return self.record(
                (y,), {"out": size}, (), 0, self._partial_sums_bytes(r.local_tokens, r.hidden) if with_bias else 0
            )[0]
        # Random words are int32, made in a few steps; where they keep an element is one byte of it.
        work = numbers * (9 if not r.is_fp32 else 8) + (size if with_bias else 0)
        return self.record(
            (y,), {"out": size, "mask": numbers}, ("mask",), work, numbers * (1 if not r.is_fp32 else 3)
        )[0]

    def add_dropout(self, x: str, y: str, p: float) -> str:
        """x + dropout(y + bias)."""
        r, size = self.sizes, self.nbytes[x]
        if r.fused_kernels:
            partial = self._partial_sums_bytes(r.local_tokens, r.hidden)
            return self.record(
                (x, y), {"sum": size}, backward_workspace=partial, grad_aliases=("d sum", None if p else "d sum")
            )[0]
        if p:
            return self.residual_add(x, self.dropout(y, p))
        return self.record((x, y), {"sum": size}, forward_workspace=size, grad_aliases=("d sum", "d sum"))[0]

    def concat(self, names: list[str]) -> str:
        """Side by side, copied."""
        size = sum(self.nbytes[name] for name in names)
        return self.record(tuple(names), {"joined": size}, grad_aliases=("d joined",) * len(names))[0]

    # Into and out of a part, where data crosses ranks.

    def linear(self, x: str, rows: int, inputs: int, outputs: int, label: str = "out") -> str:
        """A product of [rows, inputs] with this rank's matrix."""
        r, made = self.sizes, rows * outputs * self.sizes.element_size
        weight = outputs * inputs
        if self.fp8:
            return self._fp8_linear(x, rows, inputs, outputs, label)
        return self.record((x,), {label: made}, (x,), 0, 0 if r.fused_wgrad else weight * r.element_size)[0]

    def _fp8_linear(self, x: str, rows: int, inputs: int, outputs: int, label: str) -> str:
        """x is kept in 8 bits, turned; weights and gradients are cast when they are used."""
        r, weight = self.sizes, inputs * outputs
        padded = -(-rows // 16) * 16
        made = {label: rows * outputs * r.element_size}
        work, back = padded * inputs + weight, 2 * padded * outputs + weight + weight * r.element_size
        if not r.fused_kernels:  # plain: each goes through fp32, and so does the product
            work += 4 * (rows * inputs + weight + 2 * rows * outputs)
            back += 4 * (rows * inputs + rows * outputs + weight)
        if self.fp8 == "bf16":
            return self.record((x,), made, (x,), work, weight * r.element_size)[0]
        return self.record((x,), {**made, "x8": padded * inputs}, ("x8",), work, back)[0]

    def column_parallel(self, x: str, *outputs: int) -> list[str]:
        """Column-split products of the same x."""
        r = self.sizes
        if r.sequence_parallel and not self.fp8 and not (self.keep_gathered & set(self.scopes)):
            order = self.hidden_bytes if r.samples > 1 else 0  # ranks' tokens are put in order by a copy
            weights = sum(outputs) * r.hidden * r.element_size
            made = {f"out{n}": r.tokens * each * r.element_size for n, each in enumerate(outputs)}
            summed = self.hidden_bytes if r.gathers_by_all_reduce else self.local_hidden_bytes
            return self.record(
                (x,), made, (x,), self.hidden_bytes + order, 2 * self.hidden_bytes + max(2 * order, summed) + weights
            )
        x = self.gather_tokens(x)
        return [self.linear(x, r.tokens, r.hidden, each) for each in outputs]

    def gather_tokens(self, x: str) -> str:
        """Every token on every rank; backward sums."""
        r = self.sizes
        if r.tp == 1:
            return x
        if not r.sequence_parallel:
            return self.record((x,), {}, backward_workspace=self.nbytes[x], views={"on": (x, self.nbytes[x])})[0]
        order = self.hidden_bytes if r.samples > 1 else 0
        return self.record(
            (x,), {"whole": self.hidden_bytes}, (), order, order + (self.hidden_bytes if r.gathers_by_all_reduce else 0)
        )[0]

    def reduce_output(self, x: str) -> str:
        """After a row-split product: summed over ranks, each keeping its tokens under sequence parallelism."""
        r = self.sizes
        if r.tp == 1:
            return x
        if not r.sequence_parallel:
            return self.record((x,), {"sum": self.nbytes[x]}, grad_aliases=("d sum",))[0]
        order = self.hidden_bytes if r.samples > 1 else 0
        return self.record(
            (x,),
            {"own": self.local_hidden_bytes},
            (),
            order + (self.hidden_bytes if r.gathers_by_all_reduce else 0),
            order,
        )[0]

    # Inside the parts.

    def rope(self, qkv: str) -> tuple[str, str, str]:
        r = self.sizes
        q, k = (r.tokens * heads * r.head_size * r.element_size for heads in (r.heads, r.kv_heads))
        work = back = 0
        if not r.fused_kernels:  # rotated in fp32, half by half
            work, back = (2 * q - k, 2 * q - k) if r.is_fp32 else (7 * q - k, 6 * q - k)
        names = self.record((qkv,), {"q": q, "k": k}, (), work, max(back, 0), {"v": (qkv, k)})
        return names[0], names[1], names[2]

    def attention(self, q: str, k: str, v: str, p: float = 0.0) -> str:
        """Of heads that lie side by side; `p`: dropout of its weights."""
        r = self.sizes
        out = r.tokens * r.heads * r.head_size * r.element_size
        lse = 4 * r.tokens * r.heads
        scores = r.tokens * r.seq_len * r.heads
        if r.cp > 1 or r.document_mask:
            return self._context_attention(q, k, v, out, lse, p)
        with self.scope("core_attention"):
            if p:
                # Softmax in fp32, which elements stay (a byte), and the weights as they multiply.
                kept = scores * (9 if r.is_fp32 else 7)
                work, back = (scores * 12, scores * 3) if r.is_fp32 else (scores * 14, scores * 6)
                return self.record((q, k, v), {"out": out, "weights": kept}, (q, k, v, "weights"), work, back)[0]
            if r.is_fp32 and not r.gqa_fp32 and r.kv_heads != r.heads:  # keys and values are copied for each head
                k, v = (self.record((each,), {"copies": out})[0] for each in (k, v))
            return self.record((q, k, v), {"out": out, "lse": lse}, (q, k, v, "out", "lse"))[0]

    def _context_attention(self, q: str, k: str, v: str, out: int, lse: int, p: float) -> str:
        """Merged in fp32; keys and values of other ranks come while those at hand are used."""
        r = self.sizes
        fp32 = out * 4 // r.element_size
        pair = 2 * r.tokens * r.kv_heads * r.head_size * r.element_size
        if r.cp > 1:
            coming = pair * (r.cp + 1 if r.cp_all_gather else 2)
            back = fp32 * 2 + (pair * 4 // r.element_size) * ((2 * r.cp) if r.cp_all_gather else 3) + coming
        else:
            coming, back = 0, fp32 * 2 + pair * 4 // r.element_size
        tiles = 4 * TILE_BYTES if p else TILE_BYTES if r.document_mask else 0
        least = 4 * r.heads * r.seq_len * r.cp
        tiles = min(tiles, 4 * max(least, r.tokens * r.seq_len * r.cp * 4 * r.heads)) if tiles else 0
        with self.scope("core_attention" if r.cp == 1 else "ring"):
            return self.record(
                (q, k, v), {"out": out, "lse": lse}, (q, k, v, "out", "lse"), 2 * fp32 + coming + tiles, back + tiles
            )[0]

    def qkv_attention(self, projections: list[str], p: float, packed: bool) -> str:
        """Of one product or of three with as many heads each; packed, or with dropout, by the device's own kernel."""
        r = self.sizes
        size = r.tokens * r.heads * r.head_size * r.element_size
        lse = 4 * r.tokens * r.heads
        if packed or (r.fused_kernels and p and r.cp == 1 and not r.document_mask):
            qkv = projections[0] if len(projections) == 1 else self.record(tuple(projections), {"qkv": 3 * size})[0]
            with self.scope("core_attention"):
                return self.record((qkv,), {"out": size, "lse": lse}, (qkv, "out", "lse"), 0, lse)[0]
        if len(projections) == 1:
            views = dict.fromkeys("qkv", (projections[0], size))
            projections = self.record((projections[0],), {}, views=views)
        return self.attention(projections[0], projections[1], projections[2], p)

    def swiglu(self, gate_up: str) -> str:
        half = self.nbytes[gate_up] // 2
        with self.scope("activation"):
            if self.sizes.fused_kernels:
                return self.record((gate_up,), {"out": half}, (gate_up,))[0]
            return self.record((gate_up,), {"out": half, "silu": half}, (gate_up, "silu"), 0, half)[0]

    def gelu(self, x: str, rows: int, columns: int) -> str:
        """Of x + bias."""
        size = self.nbytes[x]
        with self.scope("activation"):
            if self.sizes.fused_kernels:
                return self.record((x,), {"out": size}, (x,), 0, self._partial_sums_bytes(rows, columns))[0]
            return self.record((x,), {"out": size, "biased": size}, ("biased",))[0]
