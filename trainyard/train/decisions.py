"""Choices that follow from the configuration alone: a run makes them and a plan predicts them by the same functions."""

from trainyard.config.schema import Config
from trainyard.families import family_of
from trainyard.parallel.layout import Layout

MIN_CHUNK_TOKENS = 256
"""Fewest tokens in a chunk of logits, however little memory the device grants: smaller matrix products are slow."""


def packs_batches(config: Config, layout: Layout, has_varlen_attention: bool) -> bool:
    """True if a micro batch with padding (BERT) is packed: padding is removed and the samples are concatenated. That
    takes variable-length attention kernels, and whole samples on every rank."""
    return has_varlen_attention and family_of(config.model).has_padding and layout.tp == layout.pp == layout.cp == 1


def zero_stage(config: Config, shards: int) -> int:
    """The ZeRO stage in effect among `shards` ranks that hold the same parameters."""
    return config.layout.zero if shards > 1 else 0


def fuses_wgrad(config: Config, layout: Layout, has_fused_wgrad: bool, compiled: bool) -> bool:
    """True if matrix products add weight gradients directly to the gradient buffer (fused wgrad accumulation).

    A compiler, FSDP and a pipeline schedule that splits the backward pass need gradients as tensors of their own; the
    products of sequence parallelism and of fp8 have no fused form.
    """
    return (
        has_fused_wgrad
        and not compiled
        and zero_stage(config, layout.dp * layout.cp) < 2
        and config.layout.pipeline_schedule == "1f1b"
        and not (layout.tp > 1 and config.layout.sequence_parallel)
        and config.precision.kind != "fp8"
    )


def fp8_layer_range(config: Config) -> range:
    """The layers that multiply in fp8; none unless precision.kind is fp8."""
    precision = config.precision
    end = config.model.layers - precision.bf16_last_layers if precision.kind == "fp8" else 0
    return range(precision.bf16_first_layers, end)


def loss_chunk_tokens(tokens: int, local_vocab: int, logits_bytes: int) -> int:
    """Tokens whose fp32 logits exist at one time, for at most `logits_bytes`. All chunks have this size except perhaps
    the last."""
    limit = max(MIN_CHUNK_TOKENS, logits_bytes // (4 * local_vocab))
    chunks = -(-tokens // limit)
    return -(-tokens // chunks)
