"""Computes the next tokens of a batch of sequences, with a cache of keys and values at fixed addresses.

A sequence has a slot. `prefill` puts tokens into the cache, `decode` computes one token for each of the first slots.
Results stay on the device, where the next step finds them; the host reads them later. Every decode step has one of few
static shapes, so that it can be compiled and captured as a graph of the device.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainyard import compat
from trainyard.devices import Device
from trainyard.inference.cached_attention import CacheState, LayerCache
from trainyard.inference.requests import MAX_LOGPROBS, SamplingOptions
from trainyard.inference.sampling import Sampler, StepNeeds, token_logprobs
from trainyard.models import Batch, TransformerStage

VISIBLE_STEP = 64
"""Decode attends to a multiple of this many positions; to a coarser one if there are many, so that there are few
shapes."""
MAX_GRAPHS = 256
"""Compiled decode steps: powers of two of rows and of visible positions."""


class NextTokens(NamedTuple):
    """New tokens of some slots, on the host."""

    tokens: list[int]
    logprobs: list[float] | None
    top_logprobs: list[list[tuple[int, float]]] | None
    """MAX_LOGPROBS pairs of token and log-probability for each slot."""

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> "NextTokens":
        """From tokens alone, or from tokens and their log-probabilities, or what `token_logprobs` returns."""
        tokens, *rest = (tensor.tolist() for tensor in tensors)
        if len(rest) < 3:
            return cls(tokens, rest[0] if rest else None, None)
        logprobs, top_ids, top_values = rest
        tops = [list(zip(ids, values, strict=True)) for ids, values in zip(top_ids, top_values, strict=True)]
        return cls(tokens, logprobs, tops)


PendingTokens = Callable[[], NextTokens]
"""Waits for the tokens of a step, not for later ones."""


def start_reading(device: Device, results: Sequence[Tensor]) -> PendingTokens:
    """Start copying results to the host. The copies are queued before the step that overwrites the results."""
    copies = [device.copy_to_host(tensor) for tensor in results]
    return lambda: NextTokens.from_tensors([copy() for copy in copies])


class GraphedStep:
    """A step that is captured together with the copies of its results, which between two graphs would take as long as
    several kernels. Two graphs take turns, so that a step is read while the next one runs."""

    def __init__(self, device: Device, work: Callable[[], Sequence[Tensor]], results: Sequence[Tensor]) -> None:
        """`results` are what `work` returned when it ran before."""
        self.graphs = itertools.cycle([_Graph(device, work, results) for _ in range(2)])

    def __call__(self) -> PendingTokens:
        return next(self.graphs).replay()


class _Graph:
    def __init__(self, device: Device, work: Callable[[], Sequence[Tensor]], results: Sequence[Tensor]) -> None:
        self.device = device
        self.on_host = [device.alloc_host_buffer(tensor.shape, tensor.dtype) for tensor in results]
        self.read: PendingTokens | None = None

        def work_and_copy() -> None:
            for host, tensor in zip(self.on_host, work(), strict=True):
                host.copy_(tensor, non_blocking=True)

        self.run = device.capture_graph(work_and_copy)

    def replay(self) -> PendingTokens:
        if self.read:
            self.read()  # a caller that is two steps behind still gets its tokens
        self.run()
        wait_until_done = self.device.record_progress()

        @functools.cache
        def read() -> NextTokens:
            wait_until_done()
            return NextTokens.from_tensors(self.on_host)

        self.read = read
        return read


class DecodeVariant(NamedTuple):
    """What differs between captured decode steps."""

    rows: int
    visible: int
    needs: StepNeeds


class Engine:
    """Owns the model, its cache, and the last token of every slot."""

    def __init__(self, model: TransformerStage, state: CacheState, device: Device, vocab: int, compiled: bool) -> None:
        """`model` has layers with a cache or states that share `state`. With `compiled`, decode steps are compiled,
        one graph for each shape."""
        self.model, self.state, self.device = model, state, device
        self._layers = [module for module in model.modules() if isinstance(module, LayerCache)]
        self.num_slots, self.max_seq_len = state.lengths.shape[0], self._layers[0].max_seq_len - 1
        self.has_rings = any(module.is_ring for module in self._layers)
        """A ring keeps the last tokens only, and a state cannot be cut: a prompt begins with another one's if
        `keep_state` was called there."""
        handle = device.torch_device
        self.lengths = state.lengths
        self.tokens = torch.zeros_like(self.lengths)
        """The last token of each slot, which is not in the cache yet."""
        self.is_active = state.is_active
        self.sampler = Sampler(self.num_slots, vocab, device)
        self._adapters = [0] * self.num_slots
        self._prompt_lengths = [0] * self.num_slots
        self._released: list[int] = []
        """Slots that are free, of which the device has not been told."""
        self.rng_key = torch.zeros(2, dtype=torch.int32, device=handle)
        self.sample_ids = torch.zeros_like(self.lengths)
        self.kernels = model.kernels
        self.compute_logits: Callable[[Tensor, Tensor, int], Tensor] = self._decode_logits
        if compiled:
            compat.allow_recompiles(MAX_GRAPHS)
            # A small model on a CPU would need 5 % of its time to check what never changes between steps, and 10 % to
            # call its kernels from Python.
            options: Any = {"guard_filter_fn": _guards_to_keep, "cpp_wrapper": device.synchronous}
            # Graphs belong to code, and without conditions on modules every engine would take those of the first one.
            decode = FunctionType(Engine._decode_logits.__code__.replace(), globals())
            self.compute_logits = torch.compile(partial(decode, self), dynamic=False, fullgraph=True, options=options)
        self.steps: dict[DecodeVariant, Callable[[], PendingTokens]] = {}

    @torch.inference_mode()
    def start(self, slot: int, options: SamplingOptions, prompt: Sequence[int], adapter: int = 0) -> None:
        """Assign a slot to a new sequence."""
        self.sampler.start(slot, options, prompt)
        self._prompt_lengths[slot] = len(prompt)
        if self._adapters[slot] != adapter:
            self._adapters[slot] = self.state.adapters[slot] = adapter

    @torch.inference_mode()
    def allow_tokens(self, slot: int, words: Tensor) -> None:
        """The tokens that a slot may choose next, as a bit mask. All steps before must have been read."""
        assert self.sampler.masks
        self.sampler.masks.set(slot, words)

    @functools.cached_property
    def _caches(self) -> list[tuple[Tensor, Tensor]]:
        """The caches that are no rings, each with a copy of the first position of free slots: a decode step leaves its
        token there."""
        caches = [cache for layer in self._layers if not layer.is_ring for cache in layer.caches]
        return [(cache, torch.zeros_like(cache[:, :, 0])) for cache in caches]

    @functools.cached_property
    def _rings(self) -> list[tuple[Tensor, Tensor]]:
        """The caches that are rings or states, each with a copy of what it was after the tokens of a slot that are
        kept."""
        layers = [layer for layer in self._layers if layer.is_ring]
        return [(cache, torch.zeros_like(cache)) for layer in layers for cache in layer.caches]

    @torch.inference_mode()
    def keep_state(self, slot: int) -> None:
        """Let prompts begin with all tokens that are in the cache of a slot now, though its rings will lose them."""
        for ring, kept in self._rings:
            kept[slot] = ring[slot]

    @torch.inference_mode()
    def keep_prefix(self, slot: int) -> None:
        """Let the cache of a slot survive its release."""
        for cache, first in self._caches:
            first[slot] = cache[slot, :, 0]

    @torch.inference_mode()
    def move_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of one free slot to another."""
        for cache, first in self._caches:
            cache[target, :, :length], first[target] = cache[source, :, :length], first[source]
        for _, kept in self._rings:
            kept[target] = kept[source]

    @torch.inference_mode()
    def reuse_prefix(self, source: int, target: int, length: int, source_is_free: bool) -> None:
        """Begin a sequence in `target` with the first positions of `source`, which may be the same slot."""
        self._publish()
        for cache, first in self._caches:
            if source != target:
                cache[target, :, :length] = cache[source, :, :length]
            if source_is_free:
                cache[target, :, 0] = first[source]
        for ring, kept in self._rings:
            ring[target] = kept[target] = kept[source]
        self.lengths[target] = length

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        """Free a slot."""
        self._released.append(slot)

    def _publish(self) -> None:
        """Tell the device which slots were freed, and the options of new sequences, before it computes with them."""
        self.sampler.publish()
        if self._released:
            index = torch.tensor(self._released, device=self.device.torch_device)
            self.lengths[index] = self.is_active[index] = 0
            self._released.clear()

    @torch.inference_mode()
    def prefill(
        self,
        slots: Sequence[int],
        rows: Sequence[Sequence[int]],
        start: int,
        is_last: bool,
        needs: StepNeeds,
    ) -> PendingTokens | None:
        """Put tokens into the cache, from position `start` on; several rows only from position 0 on.

        If they end the prompts (`is_last`), the slots become active; returns a function that waits for their first new
        tokens.
        """
        self._publish()
        handle, longest = self.device.torch_device, max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.int32)
        index = torch.tensor(slots, device=handle)
        positions = torch.arange(start, start + longest, dtype=torch.int32, device=handle).expand(len(rows), -1)
        counts = torch.tensor([len(row) for row in rows], device=handle)
        self.state.decoding, self.state.slots, self.state.start, self.state.counts = False, index, start, counts
        prompt_lengths = [self._prompt_lengths[slot] for slot in slots]
        x_BTD = self.model.run_blocks(self._batch(padded.to(handle), positions, prompt_lengths))
        if not is_last:
            self.lengths[index] = start + longest  # decode steps of other slots leave their token there
            return None
        last = counts - 1
        logits = self._logits(x_BTD[torch.arange(len(rows), device=handle), last][:, None]).float()
        lengths = (last + start + 1).int()
        chosen = self.sampler.choose(logits, index, lengths, needs)
        self.tokens[index], self.lengths[index], self.is_active[index] = chosen, lengths, 1
        if needs.penalized and self.sampler.penalties:
            self.sampler.penalties.counts[index, chosen] += 1
        return start_reading(self.device, [chosen, *self._logprobs(logits, chosen, index, needs)])

    @torch.inference_mode()
    def decode(self, rows: int, longest: int, needs: StepNeeds) -> PendingTokens:
        """Compute one token for each of the first slots. Returns a function that waits for them.

        `longest` is the largest number of tokens of a slot, the one to be computed excluded.
        """
        self._publish()
        rows = min(_next_power_of_two(rows), self.num_slots)
        visible = self.max_seq_len + 1
        if not all(layer.reads_lengths for layer in self._layers):
            visible = min(_round_up(longest + 1), visible)
        # A kernel that reads the lengths itself needs no bound on them, so its steps differ in the rows only.
        variant = DecodeVariant(rows, visible, needs)
        if variant not in self.steps:
            self.steps[variant] = self._prepare_step(variant)
        return self.steps[variant]()

    def _prepare_step(self, variant: DecodeVariant) -> Callable[[], PendingTokens]:
        """A function that queues a step."""
        rows = slice(variant.rows)
        work = partial(self._decode, self.tokens[rows], self.lengths[rows], self.is_active[rows], variant)
        if not self.device.supports_graphs:
            return lambda: start_reading(self.device, work())
        states = [cache for layer in self._layers if layer.is_state for cache in layer.caches]
        changed = [self.tokens, self.lengths, *(cache[rows] for cache in states)]
        if variant.needs.penalized and self.sampler.penalties:
            changed.append(self.sampler.penalties.counts)
        before = [tensor.clone() for tensor in changed]
        for _ in range(2):  # compile kernels and allocate their memory before the capture
            results = work()
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
        return GraphedStep(self.device, work, results)

    def _decode(self, tokens: Tensor, lengths: Tensor, is_active: Tensor, variant: DecodeVariant) -> list[Tensor]:
        logits, needs = self.compute_logits(tokens, lengths, variant.visible), variant.needs
        if needs.sampled or needs.penalized or needs.constrained:
            chosen = self.sampler.choose(logits.float(), slice(variant.rows), lengths + 1, needs)
        else:
            chosen = self.kernels.greedy_tokens(logits)
        tokens.copy_(chosen)
        lengths.add_(is_active)
        if needs.penalized and self.sampler.penalties:
            counts = self.sampler.penalties.counts[: variant.rows]
            counts.scatter_add_(1, chosen.long()[:, None], is_active[:, None])
        return [chosen, *self._logprobs(logits, chosen, slice(variant.rows), needs)]

    def _logprobs(self, logits: Tensor, chosen: Tensor, index: Any, needs: StepNeeds) -> tuple[Tensor, ...]:
        """What a step reports besides the tokens that the slots in `index` have chosen."""
        if needs.logprobs:
            return token_logprobs(self.kernels.log_softmax(logits.float()), chosen, MAX_LOGPROBS)
        if not needs.choices:
            return ()
        temperature = self.sampler.temperature[index]
        scaled = logits.float() / torch.where(temperature <= 0, 1.0, temperature)[:, None]
        return (self.kernels.log_softmax(scaled).gather(1, chosen.long()[:, None])[:, 0],)

    def _decode_logits(self, tokens: Tensor, lengths: Tensor, visible: int) -> Tensor:
        self.state.decoding, self.state.visible = True, visible
        return self._logits(self.model.run_blocks(self._batch(tokens[:, None], lengths[:, None])))

    def _batch(self, tokens: Tensor, positions: Tensor, prompt_lengths: Sequence[int] = ()) -> Batch:
        sample_ids = self.sample_ids[: len(tokens)]  # seeds of dropout, which is off
        batch: Batch = {"tokens": tokens, "position_ids": positions, "sample_ids": sample_ids, "rng_key": self.rng_key}
        if self.model.static_length:
            lengths = torch.tensor(prompt_lengths, device=tokens.device) if prompt_lengths else positions[:, -1] + 1
            batch["sequence_lengths"] = lengths
        return batch

    def _logits(self, x_B1D: Tensor) -> Tensor:
        """Logits of one token per row, [B, V], equal on all ranks."""
        output = self.model.head(x_B1D, {})
        return output.logits_of(output.hidden_for_head(), self.kernels.linear)[:, 0]


def _guards_to_keep(guards: Sequence[Any]) -> list[bool]:
    """Which of its conditions a compiled step checks: not those on modules and globals."""
    compiler: Any = torch.compiler
    filters = compiler.skip_guard_on_all_nn_modules_unsafe, compiler.skip_guard_on_globals_unsafe
    return [all(keeps) for keeps in zip(*(keep(guards) for keep in filters), strict=True)]


def _round_up(positions: int) -> int:
    """A multiple of VISIBLE_STEP and of a power of two between an eighth and a fourth of the positions."""
    step = max(VISIBLE_STEP, _next_power_of_two(positions) // 8)
    return -(-positions // step) * step


def _next_power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
