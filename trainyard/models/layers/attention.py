"""Core attention: softmax(q k / sqrt(K)) v on this rank's heads, under tensor and context parallelism.

V: width of values, if it is not that of keys.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.core.counter_rng import DropoutRng, RowSeeds
from trainyard.core.splits import head_range
from trainyard.kernels.batch_invariant import with_gradients_of
from trainyard.kernels.reference import AttentionScores, Kernels, counter_dropout
from trainyard.models.layers.dropout import dropout_site
from trainyard.parallel.context_parallel import ContextAxis
from trainyard.parallel.recompute import Recomputable
from trainyard.parallel.tensor_parallel import TensorAxis


class PackedSequences(NamedTuple):
    """The sequences of a batch, concatenated into a single row of tokens without padding."""

    cu_seqlens: Tensor
    """Start of each sequence, and the end of the last one; int32 [S + 1]."""
    max_seqlen: int
    """Upper bound of the sequence lengths."""


class CoreAttention(Recomputable):
    """softmax(q k / sqrt(K)) v on this rank's heads. The causal mask is a constant of the graph, never an input."""

    site: Tensor
    head_offset: Tensor
    """Global index of this rank's first query head."""
    kv_index: Tensor
    """Local kv head that each local query head uses."""
    cp_rank: Tensor

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        causal: bool,
        dropout: float,
        site: str,
        tp: TensorAxis,
        cp: ContextAxis,
        kernels: Kernels | None = None,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: nn.Parameter | None = None,
    ) -> None:
        """`window`: number of tokens, its own included, that a token attends to at most (sliding window). `scale`,
        `soft_cap` and `sinks` (of this rank's heads) are those of `AttentionScores`."""
        super().__init__()
        assert causal or window is None
        self.scale, self.soft_cap, self.sinks = scale, soft_cap, sinks
        self.causal, self.kernels, self.window = causal, kernels or Kernels(), window
        self.p = dropout
        self.cp = cp
        # Recomputing a ring alone would repeat all its communication and save nothing: the modules around it keep its
        # inputs and outputs anyway.
        self.recompute_name = "core_attention" if cp.size == 1 or cp.decomposes_attention else "ring"
        self.local_heads = local_heads = heads // tp.size
        first = tp.rank * local_heads
        self.register_buffer("site", dropout_site(site), persistent=False)
        self.register_buffer("head_offset", torch.tensor(first, dtype=torch.int32), persistent=False)
        # If neither kv heads nor tp ranks divide the other, the local query heads use the local kv heads unevenly:
        # give each query head its own copy.
        self.uneven_kv = kv_heads % tp.size > 0 and tp.size % kv_heads > 0
        kv_index = torch.arange(first, first + local_heads) // (heads // kv_heads)
        kv_index = kv_index - head_range(kv_heads, tp.size, tp.rank)[0]
        self.register_buffer("kv_index", kv_index.int(), persistent=False)
        self.register_buffer("cp_rank", torch.tensor(cp.rank, dtype=torch.int32), persistent=False)

    @property
    def scores(self) -> AttentionScores:
        return AttentionScores(self.scale, self.soft_cap, self.sinks)

    def forward(
        self,
        q_BHTK: Tensor,
        k_BGTK: Tensor,
        v_BGTV: Tensor,
        documents_BT: Tensor | None = None,
        seeds: RowSeeds | None = None,
    ) -> Tensor:
        """A query sees only keys of its own document. Without a causal mask, document 0 is padding."""
        k_BGTK, v_BGTV = self.even_kv_heads(k_BGTK), self.even_kv_heads(v_BGTV)
        if not self.kernels.is_batch_invariant:
            return self._attend(q_BHTK, k_BGTK, v_BGTV, self.sinks, documents_BT, seeds)
        first_B = torch.zeros(len(q_BHTK), dtype=torch.int32, device=q_BHTK.device)
        sinks = () if self.sinks is None else (self.sinks,)

        def invariant(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
            return self.kernels.attention(q, k, v, first_B, documents_BT, self.window, self.scores)

        def plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            return self._attend(q, k, v, sinks, documents_BT, seeds)

        return with_gradients_of(plain, invariant, q_BHTK, k_BGTK, v_BGTV, *sinks)

    def _attend(
        self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, sinks: Tensor | None, documents_BT: Tensor | None,
        seeds: RowSeeds | None,
    ) -> Tensor:  # fmt: skip
        use_dropout = self.training and self.p > 0
        window = self._effective_window(q_BHTK.shape[2])
        scores = AttentionScores(self.scale, self.soft_cap, sinks)
        # 1. Attention by blocks of keys: ring or gathered keys under context parallelism; documents and windows, whose
        # blocks are skipped where no query sees a key; and what torch's fused attention lacks, or computes with all
        # scores in memory. One opaque operator, which makes its masks and dropout itself.
        by_blocks = self.cp.size > 1 or (self.causal and documents_BT is not None) or window is not None
        is_plain = self.soft_cap is None and sinks is None
        by_blocks = by_blocks or not is_plain or k_BGTK.shape[3] != v_BGTV.shape[3]
        if by_blocks and not self.cp.decomposes_attention:
            rng = DropoutRng(self.p, *seeds, self.site, self.head_offset) if use_dropout and seeds else None
            return self.cp.attend(q_BHTK, k_BGTK, v_BGTV, self.causal, documents_BT, rng, window, scores)
        # From here on every key is on this rank: there is one rank, or the device's compiler wants plain operators.
        k_BGSK, v_BGSV = self.cp.gather_sequence(k_BGTK, 2), self.cp.gather_sequence(v_BGTV, 2)
        visible = self._visible_keys(documents_BT, q_BHTK.shape[2])
        return self._plain_attention(q_BHTK, k_BGSK, v_BGSV, visible, scores, seeds if use_dropout else None)

    def _plain_attention(
        self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, visible: Tensor | None, scores: AttentionScores,
        seeds: RowSeeds | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention over the keys that `visible` shows (none: all, or a triangle if causal), with dropout if there are
        seeds."""
        repeat, keys = q_BHTK.shape[1] // k_BGSK.shape[1], k_BGSK.shape[2]
        is_fused = scores.soft_cap is None and scores.sinks is None and seeds is None
        # Without a fused fp32 kernel for fewer kv heads torch would materialize all scores; copies are smaller.
        has_kernel = is_fused and (q_BHTK.dtype != torch.float32 or self.kernels.has_fp32_gqa)
        if repeat > 1 and not has_kernel:
            k_BGSK, v_BGSV = (x[:, :, None].expand(-1, -1, repeat, -1, -1).flatten(1, 2) for x in (k_BGSK, v_BGSV))
        if is_fused:
            # 2. torch's fused attention. `is_causal` only without a mask: torch refuses both, and the mask is causal.
            grouped, is_causal = q_BHTK.shape[1] != k_BGSK.shape[1], self.causal and visible is None
            return F.scaled_dot_product_attention(
                q_BHTK, k_BGSK, v_BGSV, visible, is_causal=is_causal, scale=scores.scale, enable_gqa=grouped
            )
        # 3. Soft-caps and sinks in plain operators, and dropout of the weights whose mask must not depend on the layout
        # (torch's kernels draw their own): scores and weights are materialized, in fp32 up to the softmax.
        score_BHTS = scores.cap((q_BHTK @ k_BGSK.transpose(2, 3)).float() * scores.scale_of(q_BHTK.shape[3]))
        if visible is not None:
            score_BHTS = score_BHTS.masked_fill(~visible, -torch.inf)
        elif self.causal:
            future = torch.ones(keys, keys, dtype=torch.bool, device=score_BHTS.device).triu(1)
            score_BHTS = score_BHTS.masked_fill(future, -torch.inf)
        weight_BHTS = scores.weights(score_BHTS)
        if seeds is None:
            return weight_BHTS.to(v_BGSV.dtype) @ v_BGSV
        # The mask of a weight depends on its query's (sample, position) seeds and, within that row, on head and key.
        head_H = torch.arange(q_BHTK.shape[1], dtype=torch.int32, device=q_BHTK.device) + self.head_offset
        key_S = torch.arange(keys, dtype=torch.int32, device=q_BHTK.device)
        column_H1S = head_H[:, None, None] * 0x10001 + key_S  # distinct for all heads of up to 65,537 keys
        row_B1T1 = (seeds.seed0[:, None, :, None], seeds.seed1[:, None, :, None])
        weight_BHTS = counter_dropout(weight_BHTS, self.p, row_B1T1, self.site, column_H1S)
        return weight_BHTS.to(v_BGSV.dtype) @ v_BGSV

    def even_kv_heads(self, x_BGTK: Tensor) -> Tensor:
        """Keys or values in which every local kv head serves the same number of query heads."""
        return x_BGTK.index_select(1, self.kv_index) if self.uneven_kv else x_BGTK

    def _effective_window(self, tokens: int) -> int | None:
        """The sliding window, if it hides any key of sequences of which this rank has `tokens` tokens."""
        return self.window if self.window and self.window < tokens * self.cp.size else None

    def _visible_keys(self, documents_BT: Tensor | None, tokens: int) -> Tensor | None:
        """Mask of the keys that each query sees, [B or 1, 1, T or 1, S]; None if it is all keys or a plain triangle."""
        documents_BS = None if documents_BT is None else self.cp.gather_sequence(documents_BT, 1)
        if not self.causal:  # no loss reads the output of a padded query, so that only keys need the mask
            return None if documents_BS is None else documents_BS[:, None, None, :].bool()
        window = self._effective_window(tokens)
        if documents_BS is None and self.cp.size == 1 and window is None:
            return None
        position_S = torch.arange(tokens * self.cp.size, dtype=torch.int32, device=self.cp_rank.device)
        query_T1 = self.cp.token_positions(tokens, self.cp_rank)[:, None]
        past_TS = position_S <= query_T1
        if window is not None:
            past_TS &= position_S > query_T1 - window
        if documents_BT is None or documents_BS is None:
            return past_TS[None, None]
        return (past_TS & (documents_BT[:, :, None] == documents_BS[:, None, :]))[:, None]

    def forward_qkv(
        self,
        projections: tuple[Tensor, ...],
        head_size: int,
        documents_BT: Tensor | PackedSequences | None,
        seeds: RowSeeds | None,
    ) -> Tensor:
        """Attention from the q, k and v projections [B, T, H K] (or one fused [B, T, 3 H K]) to [B, T, H K], with as
        many kv heads as query heads. Uses the device's variable-length kernel, if it has one, for packed sequences
        and for dropout, because that kernel generates the mask bits where it needs them."""
        use_dropout = self.training and self.p > 0
        packed = documents_BT if isinstance(documents_BT, PackedSequences) else None
        batch, tokens = projections[0].shape[:2]
        assert self.scores == AttentionScores(), "the kernel of packed sequences has no other scores"
        has_kernel = self.kernels.has_varlen_attention and self.cp.size == 1
        # 4. The kernel also takes equal samples, as sequences of one length, if that saves path 3 its scores.
        if packed is None and use_dropout and documents_BT is None and has_kernel:
            starts = torch.arange(batch + 1, dtype=torch.int32, device=projections[0].device) * tokens
            packed = PackedSequences(starts, tokens)
        if packed is None:
            assert not isinstance(documents_BT, PackedSequences)
            parts = projections[0].chunk(3, -1) if len(projections) == 1 else projections
            q, k, v = (y.view(batch, tokens, -1, head_size).transpose(1, 2) for y in parts)
            return self(q, k, v, documents_BT, seeds).transpose(1, 2).flatten(2)
        # 5. The variable-length kernel: one row of tokens, q, k and v side by side as the projection left them.
        rng = None
        if seeds and use_dropout:
            rng = DropoutRng(self.p, seeds.seed0.flatten(), seeds.seed1.flatten(), self.site, self.head_offset)
        qkv = (projections[0] if len(projections) == 1 else torch.cat(projections, -1)).flatten(0, 1)
        heads = qkv.shape[1] // (3 * head_size)
        out = self.kernels.varlen_attention(qkv, heads, heads, *packed, self.causal, rng)
        return out.view(batch, tokens, -1)
