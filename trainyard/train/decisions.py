"""Choices that follow from the configuration alone: a run makes them and a plan predicts them by the same functions."""

from trainyard.config.schema import PrecisionSection
from trainyard.families import ModelConfig, family_of
from trainyard.parallel.layout import Layout

MIN_CHUNK_TOKENS = 256
"""Fewest tokens in a chunk of logits, however little memory the device grants: smaller matrix products are slow."""


def packs_batches(model: ModelConfig, layout: Layout, has_varlen_attention: bool) -> bool:
    """True if a micro batch with padding (BERT) is packed: padding is removed and the samples are concatenated. That
    takes variable-length attention kernels, and whole samples on every rank."""
    return has_varlen_attention and family_of(model).has_padding and layout.tp == layout.pp == layout.cp == 1


def fuses_wgrad(layout: Layout, precision: PrecisionSection, has_fused_wgrad: bool, compiled: bool) -> bool:
    """True if matrix products add weight gradients directly to the gradient buffer (fused wgrad accumulation).

    A compiler, FSDP and a pipeline schedule that splits the backward pass need gradients as tensors of their own; the
    products of sequence parallelism and of fp8 have no fused form.
    """
    return (
        has_fused_wgrad
        and not compiled
        and layout.zero < 2
        and layout.pipeline_schedule == "1f1b"
        and not (layout.tp > 1 and layout.sequence_parallel)
        and precision.kind != "fp8"
    )


def fp8_layer_range(precision: PrecisionSection, layers: int) -> range:
    """The layers that multiply in fp8; none unless precision.kind is fp8."""
    end = layers - precision.bf16_last_layers if precision.kind == "fp8" else 0
    return range(precision.bf16_first_layers, end)


def loss_chunk_tokens(tokens: int, local_vocab: int, logits_bytes: int) -> int:
    """Tokens whose fp32 logits exist at one time, for at most `logits_bytes`. All chunks have this size except perhaps
    the last."""
    limit = max(MIN_CHUNK_TOKENS, logits_bytes // (4 * local_vocab))
    chunks = -(-tokens // limit)
    return -(-tokens // chunks)
