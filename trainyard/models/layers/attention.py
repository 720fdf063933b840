"""The pieces that the model families share. Shapes: B batch, T tokens, D hidden, H heads, G kv heads, K head size."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.config.model_schema import LinearRopeScaling, Llama3RopeScaling, LlamaConfig
from trainyard.core.counter_rng import key32, row_seeds
from trainyard.kernels.fp8_linear import Fp8Options
from trainyard.kernels.reference import AttentionDropout, Kernels, RowDropout, counter_dropout
from trainyard.models.blueprint import Blueprint, layer_index
from trainyard.parallel.layout import head_range
from trainyard.parallel.ring_attention import Dropped
from trainyard.parallel.tensor_parallel import Axes, ContextAxis, TensorAxis

Batch = dict[str, Tensor]
"""What a forward pass gets: `tokens`, `labels`, `sample` (each sample's place in the global batch), `key`, ..."""


class Draw(NamedTuple):
    """What dropout draws by: two random words for each (sample, position), a function of seed and step."""

    first_BT: Tensor
    second_BT: Tensor


def make_draw(batch: Batch, place_T: Tensor) -> Draw:
    """`sample` are places in the global batch (of samples or, packed, of each token's sample) and tokens' places are
    global too, so no layout changes a mask."""
    sample = batch["sample_ids"]
    return Draw(*row_seeds(batch["rng_key"], sample if sample.dim() > 1 else sample[:, None], place_T))


class PackedSequences(NamedTuple):
    """Sequences of one batch, one after the other in a single row of tokens, without padding between them."""

    cu_seqlens: Tensor
    """Where each begins, and where the last one ends; int32 [S + 1]."""
    max_seqlen: int
    """No sequence is longer."""


class Linear(nn.Module):
    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, kernels: Kernels, fp8: Fp8Options | None = None
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.kernels, self.fp8 = kernels, fp8

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.weight, self.bias, self.fp8)

    def matmul(self, x: Tensor) -> Tensor:
        """Without the bias: under tensor parallelism a row-split product is summed over ranks first."""
        return self.kernels.linear(x, self.weight, None, self.fp8)


class Embedding(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class OutputProjection(nn.Module):
    """The output matrix, its rows (words) shared by tensor-parallel ranks. The loss multiplies by it."""

    first: Tensor
    """The number of this rank's first word."""

    def __init__(self, weight: nn.Parameter, tp: TensorAxis) -> None:
        super().__init__()
        self.weight = weight
        first = torch.tensor(tp.rank * weight.shape[0], dtype=torch.int32)
        self.register_buffer("first", first, persistent=False)


class VocabEmbedding(OutputProjection):
    """A look-up in such a matrix: each rank adds the tokens that it holds. Tied, it is the head too."""

    def __init__(self, weight: nn.Parameter, tp: TensorAxis) -> None:
        super().__init__(weight, tp)
        self.tp = tp

    def forward(self, tokens: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        index = tokens - self.first
        here = (index >= 0) & (index < self.weight.shape[0])
        found = F.embedding(torch.where(here, index, 0), self.weight)
        return self.tp.reduce_output(torch.where(here[..., None], found, 0.0))


class RMSNorm(nn.Module):
    part = "norm"

    def __init__(self, weight: nn.Parameter, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x + y, on which the block goes on, and its norm."""
        return self.kernels.add_rms_norm(x, y, self.weight, self.eps)


class LayerNorm(nn.Module):
    part = "norm"

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter, eps: float, kernels: Kernels, post_norm: bool = False
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.eps, self.kernels, self.post_norm = eps, kernels, post_norm

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        y_bias: Tensor | None = None,
        dropout: "Dropout | None" = None,
        draw: Draw | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What the block goes on with, which is x + dropout(y + y_bias) or, `after` it, the norm of that; and the norm.
        As two results, they have their gradients summed where the norm's are made."""
        drops = dropout.drops(draw) if dropout and draw else None
        return self.kernels.add_layer_norm(x, y, y_bias, self.weight, self.bias, self.eps, drops, self.post_norm)


class Fp8Layers(NamedTuple):
    """Which blocks multiply in fp8, and how."""

    recipe: Fp8Options
    layers: range

    def for_parameter(self, name: str) -> Fp8Options | None:
        return self.recipe if layer_index(name) in self.layers else None


class ModuleFactory:
    """Makes modules whose parameters have the local shapes that the blueprint says, without memory behind them yet."""

    def __init__(self, blueprint: Blueprint, axes: Axes, kernels: Kernels, fp8: "Fp8Layers | None" = None) -> None:
        self.blueprint, self.kernels, self.fp8 = blueprint, kernels, fp8
        self.tp, self.cp = axes.tp, axes.cp

    def parameter(self, name: str) -> nn.Parameter:
        shape = self.blueprint.local_shape(name, self.tp.size, self.tp.rank)
        return nn.Parameter(torch.empty(shape, device="meta"))

    def linear(self, name: str) -> Linear:
        bias = f"{name}.bias"
        vector = self.parameter(bias) if bias in self.blueprint else None
        return Linear(
            self.parameter(f"{name}.weight"), vector, self.kernels, self.fp8.for_parameter(name) if self.fp8 else None
        )

    def embedding(self, name: str) -> Embedding:
        return Embedding(self.parameter(f"{name}.weight"))

    def vocab_embedding(self, name: str) -> VocabEmbedding:
        return VocabEmbedding(self.parameter(f"{name}.weight"), self.tp)

    def output_projection(self, name: str) -> OutputProjection:
        return OutputProjection(self.parameter(f"{name}.weight"), self.tp)

    def rms_norm(self, name: str, eps: float) -> RMSNorm:
        return RMSNorm(self.parameter(f"{name}.weight"), eps, self.kernels)

    def layer_norm(self, name: str, eps: float, post_norm: bool = False) -> LayerNorm:
        vectors = self.parameter(f"{name}.weight"), self.parameter(f"{name}.bias")
        return LayerNorm(*vectors, eps, self.kernels, post_norm)

    def dropout(self, p: float, site: str) -> "Dropout":
        return Dropout(p, site, self.kernels)

    def core_attention(self, heads: int, kv: int, causal: bool, dropout: float, site: str) -> "CoreAttention":
        return CoreAttention(heads, kv, causal, dropout, site, self.tp, self.cp, self.kernels)


class Dropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, site, global element index): no layout changes it."""

    site: Tensor

    def __init__(self, p: float, site: str, kernels: Kernels) -> None:
        super().__init__()
        self.p, self.kernels = p, kernels
        # A buffer, not a constant: blocks then share one compiled graph.
        self.register_buffer("site", torch.tensor(key32("dropout", site)[0], dtype=torch.int32), persistent=False)

    def drops(self, draw: Draw) -> RowDropout | None:
        """Who draws what; None where nothing is dropped."""
        return RowDropout(self.p, *draw, self.site) if self.training and self.p else None

    def forward(self, y_BTD: Tensor, draw: Draw) -> Tensor:
        drops = self.drops(draw)
        return y_BTD if drops is None else self.kernels.add_dropout(None, y_BTD, None, drops)

    def add_to_residual(self, x_BTD: Tensor, y_BTD: Tensor, bias: Tensor | None, draw: Draw) -> Tensor:
        """x + dropout(y + bias)."""
        return self.kernels.add_dropout(x_BTD, y_BTD, bias, self.drops(draw))


class CoreAttention(nn.Module):
    """softmax(q k / sqrt(K)) v on this rank's heads. The causal mask is a constant of the graph, never an input."""

    site: Tensor
    first_head: Tensor
    chosen: Tensor
    cp_rank: Tensor

    def __init__(
        self,
        heads: int,
        kv: int,
        causal: bool,
        dropout: float,
        site: str,
        tp: TensorAxis,
        cp: ContextAxis,
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__()
        self.causal, self.kernels = causal, kernels or Kernels()
        self.p = dropout
        self.cp = cp
        # Recomputed alone, a ring would send everything round again to save nothing: what goes in and out of it is kept
        # by its neighbours.
        self.part = "core_attention" if cp.size == 1 or cp.traces_attention else "ring"
        own = heads // tp.size
        first = tp.rank * own
        self.register_buffer("site", torch.tensor(key32("dropout", site)[0], dtype=torch.int32), persistent=False)
        self.register_buffer("first_head", torch.tensor(first, dtype=torch.int32), persistent=False)
        # Where kv heads and ranks do not divide, this rank's query heads use its kv heads unevenly: one copy for each.
        self.uneven_kv = kv % tp.size > 0 and tp.size % kv > 0
        chosen = torch.arange(first, first + own) // (heads // kv) - head_range(kv, tp.size, tp.rank)[0]
        self.register_buffer("chosen", chosen.int(), persistent=False)
        self.register_buffer("cp_rank", torch.tensor(cp.rank, dtype=torch.int32), persistent=False)

    def forward(
        self,
        q_BHTK: Tensor,
        k_BGTK: Tensor,
        v_BGTK: Tensor,
        documents_BT: Tensor | None = None,
        draw: Draw | None = None,
    ) -> Tensor:
        """A query sees keys of its own document only. Without a causal mask, document 0 is padding."""
        if self.uneven_kv:
            k_BGTK, v_BGTK = k_BGTK.index_select(1, self.chosen), v_BGTK.index_select(1, self.chosen)
        drop_it = self.training and self.p > 0
        if not self.cp.traces_attention and (self.cp.size > 1 or (self.causal and documents_BT is not None)):
            dropped = Dropped(self.p, *draw, self.site, self.first_head) if drop_it and draw else None
            return self.cp.attend(q_BHTK, k_BGTK, v_BGTK, self.causal, documents_BT, dropped)
        k_BGSK, v_BGSK = self.cp.gather_sequence(k_BGTK, 2), self.cp.gather_sequence(v_BGTK, 2)
        seen = self._visible_keys(documents_BT, q_BHTK.shape[2])
        if not drop_it:
            copies = q_BHTK.shape[1] // k_BGSK.shape[1]
            if copies > 1 and q_BHTK.dtype == torch.float32 and not self.kernels.has_fp32_gqa:
                k_BGSK, v_BGSK = (x[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2) for x in (k_BGSK, v_BGSK))
            grouped = q_BHTK.shape[1] != k_BGSK.shape[1]
            return F.scaled_dot_product_attention(
                q_BHTK, k_BGSK, v_BGSK, seen, is_causal=self.causal and seen is None, enable_gqa=grouped
            )
        assert draw is not None
        keys = k_BGSK.shape[2]
        score_BHTS = (q_BHTK @ k_BGSK.transpose(2, 3)).float() * q_BHTK.shape[3] ** -0.5
        if seen is not None:
            score_BHTS = score_BHTS.masked_fill(~seen, -torch.inf)
        elif self.causal:
            future = torch.ones(keys, keys, dtype=torch.bool, device=score_BHTS.device).triu(1)
            score_BHTS = score_BHTS.masked_fill(future, -torch.inf)
        # A weight is numbered by its query's sample and place, and by head and key's place within that row.
        head_H11 = (torch.arange(q_BHTK.shape[1], dtype=torch.int32, device=q_BHTK.device) + self.first_head)[
            :, None, None
        ]
        column_H1S = head_H11 * 0x10001 + torch.arange(keys, dtype=torch.int32, device=q_BHTK.device)
        draw = Draw(draw.first_BT[:, None, :, None], draw.second_BT[:, None, :, None])
        weight_BHTS = counter_dropout(score_BHTS.softmax(-1), self.p, draw, self.site, column_H1S)
        return weight_BHTS.to(v_BGSK.dtype) @ v_BGSK

    def _visible_keys(self, documents_BT: Tensor | None, tokens: int) -> Tensor | None:
        """Which of all keys each query sees, [B or 1, 1, T or 1, S]; None: all of them, or those of the causal rule,
        which is then a plain triangle."""
        documents_BS = None if documents_BT is None else self.cp.gather_sequence(documents_BT, 1)
        if not self.causal:  # nothing is read where a padded query stands, so that only keys need the mask
            return None if documents_BS is None else documents_BS[:, None, None, :].bool()
        if documents_BS is None and self.cp.size == 1:
            return None
        place_S = torch.arange(tokens * self.cp.size, dtype=torch.int32, device=self.cp_rank.device)
        past_TS = place_S <= self.cp.token_positions(tokens, self.cp_rank)[:, None]
        if documents_BT is None or documents_BS is None:
            return past_TS[None, None]
        return (past_TS & (documents_BT[:, :, None] == documents_BS[:, None, :]))[:, None]

    def forward_qkv(
        self, flat: tuple[Tensor, ...], size: int, documents_BT: Tensor | PackedSequences | None, draw: Draw | None
    ) -> Tensor:
        """The same from products [B, T, H K] of q, k and v with as many heads each, or from one of all three, to
        [B, T, H K]. By a kernel of the device where it has one: for packed sequences, and for dropout, whose bits it
        makes where it needs them."""
        drop_it = self.training and self.p > 0
        packed = documents_BT if isinstance(documents_BT, PackedSequences) else None
        batch, tokens = flat[0].shape[:2]
        if (
            packed is None
            and drop_it
            and documents_BT is None
            and self.kernels.has_varlen_attention
            and self.cp.size == 1
        ):
            starts = torch.arange(batch + 1, dtype=torch.int32, device=flat[0].device) * tokens
            packed = PackedSequences(starts, tokens)
        if packed is None:
            parts = flat[0].chunk(3, -1) if len(flat) == 1 else flat
            q, k, v = (y.view(batch, tokens, -1, size).transpose(1, 2) for y in parts)
            assert not isinstance(documents_BT, PackedSequences)
            return self(q, k, v, documents_BT, draw).transpose(1, 2).flatten(2)
        drops = None
        if draw and drop_it:
            drops = AttentionDropout(
                self.p, draw.first_BT.flatten(), draw.second_BT.flatten(), self.site, self.first_head
            )
        qkv = (flat[0] if len(flat) == 1 else torch.cat(flat, -1)).flatten(0, 1)
        heads = qkv.shape[1] // (3 * size)
        out = self.kernels.varlen_attention(qkv, heads, heads, packed.cu_seqlens, packed.max_seqlen, self.causal, drops)
        return out.view(batch, tokens, -1)


class BiasGelu(nn.Module):
    """What stands between the two matrices of an MLP: the first one's bias, and GELU."""

    part = "activation"

    def __init__(self, kind: str, kernels: Kernels) -> None:
        super().__init__()
        self.tanh, self.kernels = kind == "gelu_tanh", kernels

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.kernels.bias_gelu(x, bias, self.tanh)


class SwiGLU(nn.Module):
    part = "activation"

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(self, gate_up: Tensor) -> Tensor:
        return self.kernels.swiglu(gate_up)


def rope_frequencies(c: LlamaConfig) -> Tensor:
    """Radians per position of each pair of dims, [K / 2], scaled as the configuration says."""
    frequency = 1.0 / c.rope_theta ** (torch.arange(0, c.head_size, 2, dtype=torch.float32) / c.head_size)
    scaling = c.rope_scaling
    if isinstance(scaling, LinearRopeScaling):
        return frequency / scaling.factor
    if isinstance(scaling, Llama3RopeScaling):
        turns = scaling.original_max_positions * frequency / (2 * torch.pi)
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        return frequency * ((1 - smooth) / scaling.factor + smooth)
    return frequency
