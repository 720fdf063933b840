"""What `device.batch_invariant` excludes: whatever computes a token in another way when the batch is another one, or in
training than in generation."""

from typing import TYPE_CHECKING

from trainyard.families.moe import MoeConfig
from trainyard.families.registry import family_of

if TYPE_CHECKING:
    from trainyard.config.schema import Config
    from trainyard.families import ModelConfig


def model_conflict(model: "ModelConfig") -> str:
    """Why a model cannot be computed so; empty if it can."""
    reasons = {
        f"a {model.family} model does not generate": not family_of(model).is_causal,
        "experts get the tokens of all sequences at once": isinstance(model, MoeConfig),
        "adapters have matmuls of their own": bool(model.linear.wrappers()),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def check_batch_invariance(config: "Config") -> None:
    if not config.device.batch_invariant:
        return
    if reason := model_conflict(config.model):
        raise ValueError(f"device.batch_invariant=true: {reason}; nearest: false")
    layout, dropout = config.layout, getattr(config.model, "attention_dropout", 0.0)
    reasons = {
        f"precision.kind={config.precision.kind}: scales depend on the batch; nearest: bf16": (
            config.precision.kind == "fp8"
        ),
        f"layout.tp={layout.tp}: sums over ranks are not those of one rank; nearest: 1": layout.tp > 1,
        f"layout.cp={layout.cp}: sums over ranks are not those of one rank; nearest: 1": layout.cp > 1,
        f"model.attention_dropout={dropout:g}: a sampler drops nothing; nearest: 0": dropout > 0,
        "compile.enabled=true: a compiler chooses how to sum; nearest: false": config.compile.enabled,
    }
    for reason, applies in reasons.items():
        if applies:
            key, _, rest = reason.partition(": ")
            raise ValueError(f"{key}: not with device.batch_invariant=true, {rest}")
