"""The `optimizer` and `schedule` sections of the configuration."""

from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, create_model, model_validator

from trainyard.config.registries import UPDATE_RULES
from trainyard.core.section import NameOrPath, NonNegativeInt, PositiveInt, Section

OptimizerT = TypeVar("OptimizerT", bound=Section)


def _with_keys_of_rules(section: type[OptimizerT]) -> type[OptimizerT]:
    """The section with the keys of all built-in update rules, whatever its kind: one may change the kind alone."""
    keys = [UPDATE_RULES.find(name).keys for name in reversed(UPDATE_RULES.built_in)]
    bases = (*(section_of_rule for section_of_rule in keys if section_of_rule), section)
    return create_model(section.__name__, __base__=bases, __doc__=section.__doc__, __module__=__name__)


@_with_keys_of_rules
class OptimizerSection(Section):
    """The update rule. Norms and biases are exempt from weight decay, as marked in each model's blueprint."""

    kind: Annotated[str, NameOrPath(registry=UPDATE_RULES, path="module:Class")] = "adamw"
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

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.options and self.kind in UPDATE_RULES.built_in:
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
