"""Do two checkpoints hold the same model? Both run on the same tokens, and their logits are compared.

A block's weights are read when its turn comes and given up after it, so that a model larger than memory can be
compared.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainyard import models
from trainyard.checkpoint.formats.tensor_map import WeightSource, tp_rank_values
from trainyard.core.counter_rng import key64, normal_slice
from trainyard.models.blueprint import layer_index
from trainyard.models.output import ModelOutput

NUM_TOKENS = 64


@dataclass(frozen=True)
class LogitComparison:
    max_difference: float
    """Largest, of any logit; infinite where one model has a number and the other has none."""
    max_logit: float
    """Logit of the first model, by size."""


def compare_logits(weights_a: WeightSource, weights_b: WeightSource, seed: int = 0) -> LogitComparison:
    model = weights_a.model
    length = min(NUM_TOKENS, model.max_positions)
    draws = normal_slice(key64(seed, "compare"), length, slice(0, 1), slice(0, length), "cpu")
    tokens = (draws.abs() * 1e6).long().remainder(model.vocab).view(1, length)
    one, two = (_logits(weights, tokens) for weights in (weights_a, weights_b))
    alike = (one == two) | (one.isnan() & two.isnan())
    apart = (one - two).abs().masked_fill(alike, 0)
    return LogitComparison(float(apart.masked_fill(apart.isnan(), torch.inf).max()), float(one.abs().max()))


@torch.no_grad()
def _logits(weights: WeightSource, tokens: Tensor) -> Tensor:
    """All of them in a row, those of BERT's next-sentence head too."""
    values = tp_rank_values(weights)
    blueprint = models.family_of(weights.model).blueprint(weights.model)
    model = models.build_model(weights.model).eval()
    owners = {
        f"{prefix}.{key}": (module, key)
        for prefix, module in model.named_modules()
        for key, _ in module.named_parameters(recurse=False)
    }
    held: list[str] = []

    def put(name: str, tensor: Tensor) -> None:
        module, key = owners[name]
        module.register_parameter(key, nn.Parameter(tensor, requires_grad=False))

    def before(part: str) -> None:
        """Take this part's weights, and give up those of the part before."""
        for name in held:
            put(name, torch.empty(0, device="meta"))
        held.clear()
        for name in owners:
            place = blueprint.spec(name).pipeline_stage
            if str(layer_index(name)) == part or place == part or (place == "both" and part in ("first", "last")):
                put(name, values(name))
                held.append(name)

    model.pre_layer_hook = before
    everywhere = torch.arange(tokens.shape[1], dtype=torch.int32)[None]
    batch = {
        "tokens": tokens.int(),
        "rng_key": torch.zeros(2, dtype=torch.int32),
        "sample_ids": torch.zeros(1, dtype=torch.int32),
        # For BERT: every segment, no padding, logits at every place.
        "segment_ids": everywhere.remainder(getattr(weights.model, "segments", 1)),
        "attention_mask": torch.ones_like(everywhere),
        "masked_positions": everywhere,
    }
    output = model(batch)
    assert isinstance(output, ModelOutput)
    logits = [output.logits(), *([] if output.next_sentence is None else [output.next_sentence])]
    return torch.cat([each.flatten() for each in logits])
