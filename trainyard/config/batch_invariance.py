"""What `device.batch_invariant` excludes: whatever computes a token in another way when the batch is another one, or in
training than in generation."""

from typing import Any

from trainyard.families import ModelConfig, family_of
from trainyard.families.moe import MoeConfig


def model_conflict(model: ModelConfig) -> str:
    """Why a model cannot be computed so; empty if it can."""
    reasons = {
        f"a {model.family} model does not generate": not family_of(model).is_causal,
        "experts get the tokens of all sequences at once": isinstance(model, MoeConfig),
        "single tokens of recurrent layers are not computed as whole texts": any(
            model.recurrence(layer) for layer in range(model.layers)
        ),
        "adapters have matmuls of their own": bool(model.linear.wrappers()),
        "a token's rope_scaling depends on the length of its sequence": any(
            rope and rope.static_length for rope in getattr(model, "ropes", ())
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def check_batch_invariance(config: Any) -> None:
    """Raise ValueError if a `Config` asks for both."""
    if not config.device.batch_invariant:
        return
    if reason := model_conflict(config.model):
        raise ValueError(f"device.batch_invariant=true: {reason}; nearest: false")
    layout, dropout = config.layout, getattr(config.model, "attention_dropout", 0.0)
    one_rank = "sums over ranks are not those of one; nearest: 1"
    conflicts = {
        f"precision.kind={config.precision.kind}": (
            config.precision.kind == "fp8",
            "scales depend on the batch; nearest: bf16",
        ),
        f"layout.tp={layout.tp}": (layout.tp > 1, one_rank),
        f"layout.cp={layout.cp}": (layout.cp > 1, one_rank),
        f"model.attention_dropout={dropout:g}": (dropout > 0, "a sampler drops nothing; nearest: 0"),
        "compile.enabled=true": (config.compile.enabled, "a compiler chooses how to sum; nearest: false"),
    }
    for setting, (applies, why) in conflicts.items():
        if applies:
            raise ValueError(f"{setting}: not with device.batch_invariant=true, {why}")
