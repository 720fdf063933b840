"""The `optimizer` and `schedule` sections of the configuration."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from trainyard.core.section import NameOrPath, NonNegativeInt, PositiveInt, Section
from trainyard.core.user_code import is_user_path


class OptimizerSection(Section):
    """The update rule. Norms and biases are exempt from weight decay, as marked in each model's blueprint."""

    kind: Annotated[str, NameOrPath("adamw", "lamb", "muon", path="module:Class")] = "adamw"
    """adamw; lamb (layer-wise trust ratio, for very large batches); muon (orthogonalized momentum for the matrices of
    blocks, adamw for embeddings, output projection, norms and biases); or a subclass of trainyard.UpdateRule."""
    options: dict[str, Any] = Field(default_factory=dict)
    """kind=module:Class: keyword arguments of the class."""
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of the first moment (exp_avg), 0 to below 1."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the second moment (exp_avg_sq), 0 to below 1."""
    eps: float = Field(1e-8, gt=0)
    """Epsilon added to the square root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Maximum global gradient norm; 0: no clipping."""
    trust_clip: bool = False
    """lamb: limit the trust ratio to at most 1."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """muon: decay rate of the momentum, 0 to below 1."""
    nesterov: bool = True
    """muon: use Nesterov momentum."""
    ns_steps: int = Field(5, ge=1, le=20)
    """muon: Newton-Schulz iterations, in the compute dtype."""
    lr_adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """muon: factor on the learning rate of a matrix. match_rms_adamw: 0.2 sqrt(max(rows, columns)), so that values of
    lr and weight_decay for adamw fit; original: sqrt(max(1, rows / columns))."""
    adamw_lr: float | None = Field(None, gt=0)
    """muon: peak learning rate of the parameters that adamw updates; it follows the schedule of optimizer.lr. Default:
    optimizer.lr."""

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.options and not is_user_path(self.kind):
            raise ValueError(f"options={self.options}: kind={self.kind} has none; nearest: kind=my_module:MyRule")
        return self


class ScheduleSection(Section):
    """Learning rate schedule."""

    kind: Annotated[str, NameOrPath("cosine", "linear", "constant", "wsd")] = "cosine"
    """cosine and linear decay from the peak to min_lr; constant keeps the peak; wsd keeps it, then decays linearly. A
    user function takes (step, config), with 1 as the first step, and returns the factor on optimizer.lr; your function
    decides how to use the other keys of this section."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from 0."""
    decay_steps: PositiveInt | None = None
    """cosine, linear: step at which min_lr is reached; wsd: length of the final decay. Default: train.steps (wsd: a
    tenth of it)."""
    min_lr: float = Field(0.0, ge=0)
    """Minimum learning rate after the warm-up (absolute, not a fraction)."""
