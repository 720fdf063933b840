"""Sizes and options of one rank that decide how much memory its activations need."""

from math import ceil

from trainyard.config.schema import Config
from trainyard.core.constants import DTYPE_BYTES
from trainyard.core.splits import head_range
from trainyard.models import family_of
from trainyard.parallel.layout import Layout
from trainyard.plan.memory.device_kinds import DeviceKind
from trainyard.train.decisions import fuses_wgrad, packs_batches
from trainyard.train.micro_batches.split import PACKED_LENGTH_MULTIPLE


class RankSizes:
    """Sizes are those of one rank and one micro batch."""

    def __init__(self, config: Config, layout: Layout, device: DeviceKind) -> None:
        model, section = config.model, config.layout
        self.device = device
        self.tp, self.cp = layout.tp, layout.cp
        self.cp_all_gather = section.cp_method == "all_gather"
        """Context parallelism gathers keys and values instead of passing them around a ring."""
        self.sequence_parallel = section.sequence_parallel and layout.tp > 1
        self.fused_kernels = device.fused_kernels and config.device.kernels == "fused"
        """Triton kernels are used."""
        self.fused_wgrad = fuses_wgrad(config, layout, self.fused_kernels, config.compile.enabled)
        """Matrix products add weight gradients directly to the gradient buffer."""
        self.packed_batch = packs_batches(config, layout, self.fused_kernels)
        """Padding is removed from BERT samples."""
        self.document_mask = config.data.document_mask and model.family != "bert"
        """Causal attention does not cross documents."""
        self.samples, self.seq_len = config.train.micro_batch, config.data.seq_len // layout.cp
        self.tokens = self.samples * self.seq_len
        if self.packed_batch and config.data.source == "synthetic":
            # The data decide how much padding there is: synthetic samples are half to all full, less 3 special tokens.
            room = self.seq_len - 3
            mean = 3 + (room // 2 + room) / 2
            self.tokens = ceil(self.samples * mean / PACKED_LENGTH_MULTIPLE) * PACKED_LENGTH_MULTIPLE
        self.local_tokens = self.tokens // (layout.tp if self.sequence_parallel else 1)
        """Tokens between attention and MLP: fewer than `tokens` under sequence parallelism."""
        self.hidden, self.ffn, self.head_size = model.hidden, model.ffn_size // layout.tp, model.head_size
        kv_start, kv_end = head_range(model.num_kv_heads, layout.tp, 0)
        self.heads, self.kv_heads = model.heads // layout.tp, kv_end - kv_start
        self.vocab = family_of(model).blueprint(model).local_shape("embedding.weight", layout.tp)[0]
        self.element_size = DTYPE_BYTES[config.precision.compute_dtype]
        """Bytes of an element in the compute dtype."""
        self.is_fp32 = self.element_size == 4
        self.hidden_bytes, self.local_hidden_bytes = (
            tokens * model.hidden * self.element_size for tokens in (self.tokens, self.local_tokens)
        )
