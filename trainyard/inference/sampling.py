"""Chooses the next token of each row of logits: penalties and grammars, then temperature, top-k and top-p.

The noise is counter-based: a choice depends on its own row, seed and position, and on nothing else in the batch. All
operations have fixed shapes and never wait for the device, and all state is on the device at fixed addresses, so a
captured step can contain them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.core.counter_rng import element_bits, mix64, right_shift, row_seeds
from trainyard.devices import Device
from trainyard.inference.requests import SamplingOptions

SEED_OFFSET = 0x2545F4914F6CDD1D
"""Added to seeds before they are mixed: `mix64` maps 0 to 0."""
FIXED_POINT = 2.0**40
"""Probabilities are summed as integers in this unit, so that the order of the sum does not change the tokens kept."""
MAX_SEED = 2**63 - 1
WORD_BITS = 32
"""Tokens per element of a bit mask."""


class StepNeeds(NamedTuple):
    """What the requests of a step need besides the most likely tokens."""

    sampled: bool = False
    logprobs: bool = False
    choices: bool = False
    """Log-probabilities of the tokens that are drawn, and nothing else."""
    penalized: bool = False
    constrained: bool = False
    """A row may choose only the tokens of its mask."""
    filtered: bool = True
    """A row may choose only its most likely tokens, which takes sorting the vocabulary."""

    @classmethod
    def of(cls, options: Sequence[SamplingOptions]) -> "StepNeeds":
        return cls(
            any(o.temperature > 0 for o in options),
            any(o.num_logprobs is not None for o in options),
            any(o.reports_choices for o in options),
            any(o.is_penalized for o in options),
            any(o.json_schema is not None for o in options),
            any(o.temperature > 0 and (o.top_k > 0 or o.top_p < 1) for o in options),
        )


class Sampler:
    """The options of all slots, on the device. Penalties and masks are allocated when the first request needs them;
    rows without them keep their logits bit for bit."""

    def __init__(self, slots: int, vocab: int, device: Device) -> None:
        self.slots, self.vocab, self.device = slots, vocab, device
        zeros = partial(torch.zeros, slots, device=device.torch_device)
        self.temperature, self.top_k = zeros(), zeros(dtype=torch.int32)
        self.top_p, self.seeds = zeros() + 1, zeros(dtype=torch.int64)
        options = (self.temperature, self.top_k, self.top_p, self.seeds)
        self._options = [(tensor, tensor.to("cpu", copy=True)) for tensor in options]
        """Each with its values in host memory, which `publish` copies."""
        self._is_published = True
        self.penalties: TokenPenalties | None = None
        self.masks: TokenMasks | None = None

    def start(self, slot: int, options: SamplingOptions, prompt: Sequence[int]) -> None:
        """Assign a slot to a new sequence."""
        chosen = options.temperature, options.top_k, options.top_p, options.seed & MAX_SEED  # any integer is a seed
        for (_, values), value in zip(self._options, chosen, strict=True):
            values.numpy()[slot] = value
        self._is_published = False
        if options.is_penalized and self.penalties is None:
            self.penalties = TokenPenalties(self.slots, self.vocab, self.device.torch_device)
        if self.penalties:
            self.penalties.start(slot, options, prompt)
        if options.json_schema is not None and self.masks is None:
            self.masks = TokenMasks(self.slots, self.vocab, self.device)
        if self.masks:
            self.masks.allow_all(slot)

    def publish(self) -> None:
        """Bring the options of new sequences to the device: once for many that begin together."""
        if self._is_published:
            return
        for tensor, values in self._options:
            tensor.copy_(values)
        self._is_published = True

    def choose(self, logits: Tensor, index: Any, positions: Tensor, needs: StepNeeds) -> Tensor:
        """The next tokens of the slots in `index`, whose fp32 logits are given."""
        if needs.penalized and self.penalties:
            logits = self.penalties.apply(logits, index)
        if needs.constrained and self.masks:
            logits = self.masks.apply(logits, index)
        if not needs.sampled:  # the same tokens as below, without sorting the vocabulary
            return logits.argmax(-1).int()
        options = self.temperature[index], self.top_k[index], self.top_p[index], self.seeds[index]
        return choose_tokens(logits, *options, positions, needs.filtered)


class TokenPenalties:
    """Penalties as in vLLM; repetition as in transformers."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self.counts = torch.zeros(slots, vocab, dtype=torch.int32, device=device)
        """How often each token is among the new tokens of a slot."""
        self.in_prompt = torch.zeros(slots, vocab, dtype=torch.bool, device=device)
        self.presence, self.frequency = (torch.zeros(slots, device=device) for _ in range(2))
        self.repetition = torch.ones(slots, device=device)

    def start(self, slot: int, options: SamplingOptions, prompt: Sequence[int]) -> None:
        self.presence[slot], self.frequency[slot] = options.presence_penalty, options.frequency_penalty
        self.repetition[slot] = options.repetition_penalty
        self.counts[slot], self.in_prompt[slot] = 0, False
        if options.is_penalized:
            self.in_prompt[slot, torch.tensor(prompt, device=self.counts.device)] = True

    def apply(self, logits: Tensor, index: Any) -> Tensor:
        """fp32 logits [N, V] of the slots in `index`."""
        counts, repetition = self.counts[index], self.repetition[index][:, None]
        is_new = counts > 0
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(self.in_prompt[index] | is_new, repeated, logits)
        return logits - counts * self.frequency[index][:, None] - is_new * self.presence[index][:, None]


class TokenMasks:
    """The tokens that each slot may choose next, as bits: token t is bit t % 32 of word t // 32."""

    def __init__(self, slots: int, vocab: int, device: Device) -> None:
        words = -(-vocab // WORD_BITS)
        self.on_host = device.alloc_host_buffer(torch.Size((slots, words)), torch.int32)
        self.allowed = torch.full((slots, words), -1, dtype=torch.int32, device=device.torch_device)
        token = torch.arange(vocab, device=device.torch_device)
        self.word, self.bit = token // WORD_BITS, (token % WORD_BITS).int()

    def allow_all(self, slot: int) -> None:
        self.allowed[slot] = -1

    def set(self, slot: int, words: Tensor) -> None:
        """`words` may have more of them than the vocabulary needs."""
        self.on_host[slot] = words[: self.on_host.shape[1]]
        self.allowed[slot].copy_(self.on_host[slot], non_blocking=True)

    def apply(self, logits: Tensor, index: Any) -> Tensor:
        bits = self.allowed[index][:, self.word] >> self.bit
        return torch.where((bits & 1).bool(), logits, -torch.inf)


def choose_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    filtered: bool = True,
) -> Tensor:
    """[N] int32: the next token of each row of fp32 `logits` [N, V]. The tensors after it have shape [N]. Without
    `filtered`, all tokens are kept, whatever top_k and top_p are.

    temperature 0 takes the most likely token, the lowest id of equal ones. top_k 0 (or V) and top_p 1 keep all tokens.
    Filters apply in the order of transformers: temperature, then top-k, then top-p on what top-k kept. `seeds` (int64)
    and `positions` (the index of the new token in its sequence) determine the noise.
    """
    is_greedy = (temperature <= 0)[:, None]
    # Subtracting the maximum first keeps a small temperature from overflowing.
    shifted = logits - logits.amax(1, keepdim=True)
    scaled = shifted / torch.where(is_greedy, 1.0, temperature[:, None])
    noisy = scaled + gumbel_noise(seeds, positions, logits.shape[1])
    if filtered:
        noisy = torch.where(kept_tokens(scaled, top_k, top_p), noisy, -torch.inf)
    return torch.where(is_greedy, logits, noisy).argmax(1).int()


def kept_tokens(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[N, V] bool: tokens among the `top_k` most likely ones, and of those the fewest whose probabilities sum to
    `top_p`. Tokens equal to the last one kept are kept too."""
    vocab = logits.shape[1]
    descending = logits.sort(1, descending=True).values
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long()[:, None]
    kth = descending.gather(1, k - 1)
    # Rows of a multiple of 16 bytes: on a GPU, a row that begins elsewhere is summed in another order.
    rows = F.pad(torch.where(descending >= kth, descending, -torch.inf), (0, -vocab % 4), value=-torch.inf)
    probabilities = rows.softmax(1)[:, :vocab]
    # Integers, because a sum of floats depends on its order, and torch has no deterministic cumsum of them on GPUs.
    units = (probabilities * FIXED_POINT).long()
    before = units.cumsum(1) - units  # mass of the more likely tokens
    count = (before < (top_p * FIXED_POINT).long()[:, None]).sum(1, keepdim=True).clamp(min=1)
    last = torch.where(top_p[:, None] < 1, descending.gather(1, count - 1), -torch.inf)
    return logits >= torch.maximum(kth, last)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """[N, V] fp32 noise with the standard Gumbel distribution: the argmax of logits plus noise is a sample."""
    mixed = mix64(seeds.long() + SEED_OFFSET)
    key = torch.stack((mixed, right_shift(mixed, 32))).int()
    zero = torch.zeros_like(key[0])
    rows = row_seeds(key, zero, positions.int())
    column = torch.arange(vocab, dtype=torch.int32, device=seeds.device)
    bits = element_bits((rows.seed0[:, None], rows.seed1[:, None]), zero[:, None], column)
    # 31 bits. Small values are exact in fp32; they are the large noise, which decides.
    uniform = ((bits & 0x7FFFFFFF).float() + 0.5) * 2.0**-31
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24)))


def token_logprobs(logprobs: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log probability [N] of `tokens` [N], whose rows have the log probabilities `logprobs` [N, V], and the ids and log
    probabilities [N, num_top] of the most likely tokens, in descending order."""
    top = logprobs.topk(num_top, 1)
    return logprobs.gather(1, tokens.long()[:, None])[:, 0], top.indices.int(), top.values
