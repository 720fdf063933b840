"""Slots of experts: a fixed number for each sample, so that all shapes are static, as compilers of Trainium require.

The tokens of a sample take an expert's slots in the order of the sequence; those that find none skip the expert. Which
ones do depends on the sample alone, and therefore not on the layout.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.parallel.context_parallel import ContextAxis


class ExpertSlots(NamedTuple):
    """Where the (token, expert) pairs of a rank's N = B T tokens go. M = E B S slots: S for each expert and sample."""

    token_M: Tensor
    """Token in each slot; N if it is empty."""
    slot_NK: Tensor
    """Slot of each pair; M if it has none."""

    def gather(self, x_ND: Tensor) -> Tensor:
        """The tokens in their slots, [M, D]; zeros in empty ones."""
        return _with_zero_row(x_ND).index_select(0, self.token_M)

    def weights(self, weight_NK: Tensor) -> Tensor:
        """The weight of the pair in each slot, [M]; 0 in empty ones."""
        weight_M = weight_NK.new_zeros(len(self.token_M) + 1)
        return weight_M.index_add(0, self.slot_NK.flatten(), weight_NK.flatten())[:-1]

    def scatter(self, out_MD: Tensor) -> Tensor:
        """The results of all pairs, [N, K, D]; zeros for those without a slot."""
        return _with_zero_row(out_MD).index_select(0, self.slot_NK.flatten()).view(*self.slot_NK.shape, -1)


def assign_slots(expert_BTK: Tensor, experts: int, capacity: int, cp: ContextAxis, cp_rank: Tensor) -> ExpertSlots:
    """Give `capacity` slots of every expert to each sample, of which this rank has some of the tokens. All indices are
    int32: Trainium has no look-up by 64-bit integers."""
    B, T, K = expert_BTK.shape
    S = min(capacity, T)  # a token goes to an expert at most once
    M, device = experts * B * S, expert_BTK.device
    chosen_BTKE = expert_BTK[..., None] == torch.arange(experts, dtype=torch.int32, device=device)
    chosen_BTE = chosen_BTKE.sum(2, dtype=torch.int32)
    kept_BTE = chosen_BTE * (_positions(chosen_BTE, cp, cp_rank) < capacity)
    # Slots are numbered from 1 within an expert and a sample, so that 0 stands for none.
    number_BTE = kept_BTE.cumsum(1, dtype=torch.int32) * kept_BTE
    number_BTK = (number_BTE[:, :, None] * chosen_BTKE).sum(-1, dtype=torch.int32)
    sample_B11 = torch.arange(B, dtype=torch.int32, device=device)[:, None, None]
    slot_BTK = torch.where(number_BTK > 0, (expert_BTK * B + sample_B11) * S + number_BTK - 1, M)
    token_N1 = torch.arange(1, B * T + 1, dtype=torch.int32, device=device)[:, None]
    token_M = torch.zeros(M + 1, dtype=torch.int32, device=device)
    token_M = token_M.index_add(0, slot_BTK.flatten(), token_N1.expand(-1, K).flatten())[:M]
    return ExpertSlots(torch.where(token_M > 0, token_M - 1, B * T), slot_BTK.view(B * T, K))


def _positions(chosen_BTE: Tensor, cp: ContextAxis, cp_rank: Tensor) -> Tensor:
    """How many earlier tokens of the sample have chosen the same expert."""
    if cp.size == 1:
        return chosen_BTE.cumsum(1, dtype=torch.int32) - chosen_BTE
    B, T, E = chosen_BTE.shape
    half_B2TE = chosen_BTE.view(B, 2, T // 2, E)  # two chunks of the sequence, which other ranks' chunks are between
    count_B2E = half_B2TE.sum(2, dtype=torch.int32)
    count_BCE = cp.gather_sequence(count_B2E, 1)
    before_BCE = count_BCE.cumsum(1, dtype=torch.int32) - count_BCE
    chunk_2 = torch.stack((cp_rank, 2 * cp.size - 1 - cp_rank))
    before_B2E = before_BCE.index_select(1, chunk_2)
    position = half_B2TE.cumsum(2, dtype=torch.int32) - half_B2TE + before_B2E[:, :, None]
    return position.view(B, T, E)


def _with_zero_row(x: Tensor) -> Tensor:
    return torch.cat((x, x.new_zeros(1, x.shape[1])))
