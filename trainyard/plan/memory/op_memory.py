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
from trainyard.plan.memory.liveness import Op, gradient
from trainyard.plan.memory.local_sizes import Run

PROGRAMS = 2112
"""As kernels/triton/column_sums.py, which needs Triton: partial sums of a vector's gradient, at most so many."""


class Writer:
    """Writes down operations. Methods take and give names of tensors, as the model's modules do tensors."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.ops: list[Op] = []
        self.size: dict[str, int] = {}
        self.block = -1
        self.fp8: str = ""
        """As `Run.fp8`, inside a block that multiplies so."""
        self.within: tuple[str, ...] = ()
        self.keep_gathered: frozenset[str] = frozenset()
        """Parts that are recomputed, and so may keep what they gathered."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        before, self.within = self.within, (*self.within, name)
        yield
        self.within = before

    def add(
        self,
        reads: tuple[str, ...],
        makes: Mapping[str, int],
        keeps: tuple[str, ...] = (),
        work: int = 0,
        back: int = 0,
        views: Mapping[str, tuple[str, int]] | None = None,
        share: tuple[str | None, ...] = (),
    ) -> list[str]:
        """Labels in `makes`, `keeps` and `views` become names; gives those of what is made, and of views."""
        views = views or {}
        label = {key: f"{len(self.ops)} {key}" for key in (*makes, *views)}
        made = {label[key]: size for key, size in makes.items()}
        seen = {label[key]: of for key, of in views.items()}
        self.size |= made | {name: size for name, (_, size) in seen.items()}
        kept = tuple(label.get(name, name) for name in keeps)
        own = label | {gradient(key): gradient(name) for key, name in label.items()}
        shared = tuple(None if of is None else own.get(of, of) for of in share)
        self.ops.append(Op(reads, made, kept, work, back, seen, shared, self.within, self.block))
        return list(label.values())

    # Between the parts of a block.

    @property
    def between(self) -> int:
        """Bytes of [s, D]."""
        return self.run.own * self.run.hidden * self.run.element

    @property
    def whole(self) -> int:
        """Bytes of [t, D]."""
        return self.run.tokens * self.run.hidden * self.run.element

    def _partial(self, rows: int, columns: int, kinds: int = 1) -> int:
        """fp32 sums that programs of a fused backward pass leave."""
        each = -(-rows // PROGRAMS)
        return -(-rows // each) * kinds * columns * 4

    def plus(self, x: str, y: str) -> str:
        return self.add((x, y), {"sum": self.size[x]}, share=("d sum", "d sum"))[0]

    def rms_norm(self, x: str, y: str | None = None) -> tuple[str, str]:
        r, size = self.run, self.size[x]
        rows, fp32 = r.own, r.own * r.hidden * 4
        with self.part("norm"):
            if r.fused:
                partial = self._partial(rows, r.hidden)
                if y is None:
                    out, _, on = self.add(
                        (x,), {"out": size, "inverse": 4 * rows}, (x, "inverse"), 0, partial, {"on": (x, size)}
                    )
                    return on, out
                total, out, _ = self.add(
                    (x, y), {"total": size, "out": size, "inverse": 4 * rows}, ("total", "inverse"), 0, partial,
                    share=(None, gradient(x)),
                )  # fmt: skip
                return total, out
            total = x if y is None else self.plus(x, y)
            if r.adds:
                return total, self.add((total,), {"out": size, "inverse": 4 * rows}, (total, "inverse"))[0]
            # In fp32 by single operations: its input and what the weight multiplies are kept.
            copies = fp32 if r.wide else 2 * fp32
            kept = ("wide", total) if r.wide else ("wide",)
            out, _ = self.add(
                (total,), {"out": size, "wide": copies + 4 * rows}, kept, 0 if r.wide else fp32,
                2 * fp32 if r.wide else 3 * fp32,
            )  # fmt: skip
        return total, out

    def layer_norm(self, x: str, y: str | None = None, p: float = 0.0, after: bool = False) -> tuple[str, str]:
        """x + dropout(y + bias), or `after` it the norm of that; and the norm."""
        r, size, rows = self.run, self.size[x], self.run.own
        with self.part("norm"):
            if r.fused:
                partial = self._partial(rows, r.hidden, 2 if y is None else 3)
                made = {"out": size, "each": 8 * rows}
                if y is None:
                    out, _, on = self.add((x,), made, (x, "each"), 0, partial, {"on": (x, size)})
                    return on, out
                out, _, total = self.add(
                    (x, y),
                    {**made, "total": size},
                    ("total", "each"),
                    0,
                    partial,
                    share=(None, None if p else gradient(x)),
                )
                return (out if after else total), out
            total = x if y is None else self.add_dropped(x, y, p)
            out, _ = self.add((total,), {"out": size, "each": 8 * rows}, (total, "each"))
        return (out if after else total), out

    def dropped(self, y: str, p: float, biased: bool = True) -> str:
        """dropout(y + bias) alone."""
        r, size = self.run, self.size[y]
        numbers = size // r.element
        if r.fused:
            return self.add((y,), {"out": size}, (), 0, self._partial(r.own, r.hidden) if biased else 0)[0]
        # Random words are int32, made in a few steps; where they keep an element is one byte of it.
        work = numbers * (9 if not r.wide else 8) + (size if biased else 0)
        return self.add((y,), {"out": size, "mask": numbers}, ("mask",), work, numbers * (1 if not r.wide else 3))[0]

    def add_dropped(self, x: str, y: str, p: float) -> str:
        """x + dropout(y + bias)."""
        r, size = self.run, self.size[x]
        if r.fused:
            partial = self._partial(r.own, r.hidden)
            return self.add((x, y), {"sum": size}, back=partial, share=("d sum", None if p else "d sum"))[0]
        if p:
            return self.plus(x, self.dropped(y, p))
        return self.add((x, y), {"sum": size}, work=size, share=("d sum", "d sum"))[0]

    def joined(self, parts: list[str]) -> str:
        """Side by side, copied."""
        size = sum(self.size[name] for name in parts)
        return self.add(tuple(parts), {"joined": size}, share=("d joined",) * len(parts))[0]

    # Into and out of a part, where data crosses ranks.

    def linear(self, x: str, rows: int, inputs: int, outputs: int, label: str = "out") -> str:
        """A product of [rows, inputs] with this rank's matrix."""
        r, made = self.run, rows * outputs * self.run.element
        weight = outputs * inputs
        if self.fp8:
            return self._fp8_linear(x, rows, inputs, outputs, label)
        return self.add((x,), {label: made}, (x,), 0, 0 if r.sinks else weight * r.element)[0]

    def _fp8_linear(self, x: str, rows: int, inputs: int, outputs: int, label: str) -> str:
        """x is kept in 8 bits, turned; weights and gradients are cast when they are used."""
        r, weight = self.run, inputs * outputs
        padded = -(-rows // 16) * 16
        made = {label: rows * outputs * r.element}
        work, back = padded * inputs + weight, 2 * padded * outputs + weight + weight * r.element
        if not r.fused:  # plain: each goes through fp32, and so does the product
            work += 4 * (rows * inputs + weight + 2 * rows * outputs)
            back += 4 * (rows * inputs + rows * outputs + weight)
        if self.fp8 == "bf16":
            return self.add((x,), made, (x,), work, weight * r.element)[0]
        return self.add((x,), {**made, "x8": padded * inputs}, ("x8",), work, back)[0]

    def columns(self, x: str, *outputs: int) -> list[str]:
        """Column-split products of the same x."""
        r = self.run
        if r.sequence and not self.fp8 and not (self.keep_gathered & set(self.within)):
            order = self.whole if r.samples > 1 else 0  # ranks' tokens are put in order by a copy
            weights = sum(outputs) * r.hidden * r.element
            made = {f"out{n}": r.tokens * each * r.element for n, each in enumerate(outputs)}
            summed = self.whole if r.sums else self.between
            return self.add((x,), made, (x,), self.whole + order, 2 * self.whole + max(2 * order, summed) + weights)
        x = self.gathered(x)
        return [self.linear(x, r.tokens, r.hidden, each) for each in outputs]

    def gathered(self, x: str) -> str:
        """Every token on every rank; backward sums."""
        r = self.run
        if r.tp == 1:
            return x
        if not r.sequence:
            return self.add((x,), {}, back=self.size[x], views={"on": (x, self.size[x])})[0]
        order = self.whole if r.samples > 1 else 0
        return self.add((x,), {"whole": self.whole}, (), order, order + (self.whole if r.sums else 0))[0]

    def scattered(self, x: str) -> str:
        """After a row-split product: summed over ranks, each keeping its tokens under sequence parallelism."""
        r = self.run
        if r.tp == 1:
            return x
        if not r.sequence:
            return self.add((x,), {"sum": self.size[x]}, share=("d sum",))[0]
        order = self.whole if r.samples > 1 else 0
        return self.add((x,), {"own": self.between}, (), order + (self.whole if r.sums else 0), order)[0]

    # Inside the parts.

    def rope(self, qkv: str) -> tuple[str, str, str]:
        r = self.run
        q, k = (r.tokens * heads * r.head_size * r.element for heads in (r.heads, r.kv))
        work = back = 0
        if not r.fused:  # rotated in fp32, half by half
            work, back = (2 * q - k, 2 * q - k) if r.wide else (7 * q - k, 6 * q - k)
        names = self.add((qkv,), {"q": q, "k": k}, (), work, max(back, 0), {"v": (qkv, k)})
        return names[0], names[1], names[2]

    def attention(self, q: str, k: str, v: str, p: float = 0.0) -> str:
        """Of heads that lie side by side; `p`: dropout of its weights."""
        r = self.run
        out = r.tokens * r.heads * r.head_size * r.element
        lse = 4 * r.tokens * r.heads
        scores = r.tokens * r.length * r.heads
        if r.cp > 1 or r.documents:
            return self._context_attention(q, k, v, out, lse, p)
        with self.part("core_attention"):
            if p:
                # Softmax in fp32, which elements stay (a byte), and the weights as they multiply.
                kept = scores * (9 if r.wide else 7)
                work, back = (scores * 12, scores * 3) if r.wide else (scores * 14, scores * 6)
                return self.add((q, k, v), {"out": out, "weights": kept}, (q, k, v, "weights"), work, back)[0]
            if r.wide and not r.groups and r.kv != r.heads:  # keys and values are copied for each head
                k, v = (self.add((each,), {"copies": out})[0] for each in (k, v))
            return self.add((q, k, v), {"out": out, "lse": lse}, (q, k, v, "out", "lse"))[0]

    def _context_attention(self, q: str, k: str, v: str, out: int, lse: int, p: float) -> str:
        """Merged in fp32; keys and values of other ranks come while those at hand are used."""
        r = self.run
        fp32 = out * 4 // r.element
        pair = 2 * r.tokens * r.kv * r.head_size * r.element
        if r.cp > 1:
            coming = pair * (r.cp + 1 if r.gathers else 2)
            back = fp32 * 2 + (pair * 4 // r.element) * ((2 * r.cp) if r.gathers else 3) + coming
        else:
            coming, back = 0, fp32 * 2 + pair * 4 // r.element
        tiles = 4 * TILE_BYTES if p else TILE_BYTES if r.documents else 0
        least = 4 * r.heads * r.length * r.cp
        tiles = min(tiles, 4 * max(least, r.tokens * r.length * r.cp * 4 * r.heads)) if tiles else 0
        with self.part("core_attention" if r.cp == 1 else "ring"):
            return self.add(
                (q, k, v), {"out": out, "lse": lse}, (q, k, v, "out", "lse"), 2 * fp32 + coming + tiles, back + tiles
            )[0]

    def attention_of_qkv(self, flat: list[str], p: float, packed: bool) -> str:
        """Of one product or of three with as many heads each; packed, or with dropout, by the device's own kernel."""
        r = self.run
        size = r.tokens * r.heads * r.head_size * r.element
        lse = 4 * r.tokens * r.heads
        if packed or (r.fused and p and r.cp == 1 and not r.documents):
            qkv = flat[0] if len(flat) == 1 else self.add(tuple(flat), {"qkv": 3 * size})[0]
            with self.part("core_attention"):
                return self.add((qkv,), {"out": size, "lse": lse}, (qkv, "out", "lse"), 0, lse)[0]
        if len(flat) == 1:
            views = dict.fromkeys("qkv", (flat[0], size))
            flat = self.add((flat[0],), {}, views=views)
        return self.attention(flat[0], flat[1], flat[2], p)

    def swiglu(self, gate_up: str) -> str:
        half = self.size[gate_up] // 2
        with self.part("activation"):
            if self.run.fused:
                return self.add((gate_up,), {"out": half}, (gate_up,))[0]
            return self.add((gate_up,), {"out": half, "silu": half}, (gate_up, "silu"), 0, half)[0]

    def gelu(self, x: str, rows: int, columns: int) -> str:
        """Of x + bias."""
        size = self.size[x]
        with self.part("activation"):
            if self.run.fused:
                return self.add((x,), {"out": size}, (x,), 0, self._partial(rows, columns))[0]
            return self.add((x,), {"out": size, "biased": size}, ("biased",))[0]
