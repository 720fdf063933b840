"""Compares two checkpoints: by the keys of their models, bit for bit, or by the logits on the same tokens.

Tensors are compared one at a time. For logits, the weights of a block are read just before the block runs and dropped
after it. So models larger than memory can be compared.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainyard import models
from trainyard.checkpoint.weights import TrainingState, WeightSource, frozen_tensors, local_values, unfused_tensors
from trainyard.core.counter_rng import key64, normal_slice
from trainyard.families.blueprint import layer_index
from trainyard.models.output import ModelOutput

NUM_TOKENS = 64


def first_difference(source: TrainingState, target: TrainingState, dtype: torch.dtype | None) -> str | None:
    """The name of the first tensor of the source that the target does not hold bit for bit, rounded to `dtype`.

    Without `dtype`, the target may have a wider one, which holds the same values.
    """
    for kind in source.dtypes:
        frozen = frozen_tensors(source.model) if kind != "weights" else ()
        for name, tensor in unfused_tensors(source.model).items():
            if name in frozen:
                continue
            a, b = (state.readers[kind](tensor) for state in (source, target))
            expected = dtype or torch.promote_types(a.dtype, b.dtype)
            a, b = a.to(expected).contiguous(), b.contiguous()
            if a.dtype != b.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                return name if kind == "weights" else f"{kind} of {name}"
    return None


@dataclass(frozen=True)
class LogitComparison:
    max_difference: float
    """Largest absolute difference of a logit; infinite if a logit is NaN, or finite in one model only."""
    max_logit: float
    """Largest absolute logit of the first model; NaN if one is NaN."""


def compare_logits(weights_a: WeightSource, weights_b: WeightSource) -> LogitComparison:
    model = weights_a.model
    length = min(NUM_TOKENS, model.max_positions)
    noise = normal_slice(key64(0, "compare"), length, slice(0, 1), slice(0, length), "cpu")
    tokens = (noise.abs() * 1e6).long().remainder(model.vocab).view(1, length)
    a, b = (_logits(weights, tokens) for weights in (weights_a, weights_b))
    difference = (a - b).abs().masked_fill(a == b, 0)  # equal infinities have no difference; two NaNs are a difference
    return LogitComparison(float(difference.masked_fill(difference.isnan(), torch.inf).max()), float(a.abs().max()))


@torch.no_grad()
def _logits(weights: WeightSource, tokens: Tensor) -> Tensor:
    """All logits, flattened, including those of BERT's next-sentence head."""
    values = local_values(weights)
    blueprint = models.blueprint_of(weights.model)
    model = models.build_model(weights.model).eval()
    owners = {
        f"{prefix}.{key}": (module, key)
        for prefix, module in model.named_modules()
        for key, _ in module.named_parameters(recurse=False)
    }
    loaded: list[str] = []

    def set_parameter(name: str, tensor: Tensor) -> None:
        module, key = owners[name]
        module.register_parameter(key, nn.Parameter(tensor, requires_grad=False))

    def load_block(block: str) -> None:
        """Load the weights of a block (a layer number, "first" or "last") and drop those of the previous one."""
        for name in loaded:
            set_parameter(name, torch.empty(0, device="meta"))
        loaded.clear()
        for name in owners:
            stage = blueprint.spec(name).pipeline_stage
            if block in (str(layer_index(name)), stage) or (stage == "both" and block in ("first", "last")):
                set_parameter(name, values(name))
                loaded.append(name)

    model.pre_layer_hook = load_block
    positions = torch.arange(tokens.shape[1], dtype=torch.int32)[None]
    batch = {
        "tokens": tokens.int(),
        "rng_key": torch.zeros(2, dtype=torch.int32),
        "sample_ids": torch.zeros(1, dtype=torch.int32),
        # For BERT: every segment, no padding, logits at every position.
        "segment_ids": positions.remainder(getattr(weights.model, "segments", 1)),
        "attention_mask": torch.ones_like(positions),
        "masked_positions": positions,
    }
    output = model(batch)
    assert isinstance(output, ModelOutput)
    logits = [output.logits(), *([] if output.next_sentence is None else [output.next_sentence])]
    return torch.cat([head_logits.flatten() for head_logits in logits])
