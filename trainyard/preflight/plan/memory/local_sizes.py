"""Sizes and options of one rank that decide how much memory its activations need."""

from collections.abc import Sequence
from math import ceil

from trainyard.config.schema import Config
from trainyard.core.constants import DTYPE_BYTES
from trainyard.models import family_of
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.memory.device_kinds import DeviceKind
from trainyard.preflight.plan.trace.micro_batch import MicroBatchShape
from trainyard.preflight.plan.trace.stage_run import TracedStage
from trainyard.train.decisions import fp8_layer_range, fuses_wgrad, packs_batches
from trainyard.train.micro_batches.split import PACKED_LENGTH_MULTIPLE


class RankSizes:
    """Sizes are those of one rank and one micro batch."""

    def __init__(self, config: Config, layout: Layout, device: DeviceKind) -> None:
        self.config, self.layout, self.device = config, layout, device
        self.sequence_parallel = config.layout.sequence_parallel and layout.tp > 1
        self.fused_kernels = device.fused_kernels and config.device.kernels == "fused"
        """Triton kernels are used."""
        self.packed_batch = packs_batches(config, layout, self.fused_kernels)
        """Padding is removed from samples."""
        samples, seq_len = config.train.micro_batch, config.data.seq_len // layout.cp
        self.tokens = samples * seq_len
        if self.packed_batch and config.data.source == "synthetic":
            # The data decide how much padding there is: synthetic samples are half to all full, less 3 special tokens.
            room = seq_len - 3
            mean = 3 + (room // 2 + room) / 2
            self.tokens = ceil(samples * mean / PACKED_LENGTH_MULTIPLE) * PACKED_LENGTH_MULTIPLE
        self.micro_batch = MicroBatchShape(
            samples,
            seq_len,
            self.tokens if self.packed_batch else None,
            config.data.max_predictions,
            config.data.document_mask and not family_of(config.model).has_padding,
        )
        tokens = self.tokens // (layout.tp if self.sequence_parallel else 1)
        self.local_hidden_bytes = tokens * config.model.hidden * DTYPE_BYTES[config.precision.compute_dtype]
        """Bytes of the activations between attention and MLP."""

    def traced_stage(self, layers: Sequence[int], is_first: bool, is_last: bool) -> TracedStage:
        """A stage with these layers."""
        config, layout = self.config, self.layout
        return TracedStage(
            config.model,
            tuple(layers),
            self.micro_batch,
            layout.tp,
            layout.cp,
            layout.ep,
            config.layout.cp_method,
            self.sequence_parallel,
            config.recompute,
            config.precision,
            fp8_layer_range(config),
            self.device,
            self.fused_kernels,
            fuses_wgrad(config, layout, self.fused_kernels, config.compile.enabled),
            is_first,
            is_last,
        )
