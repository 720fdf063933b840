"""Objectives: losses of something else than the next token, which `train.objective` names.

No torch at the top: configurations name an objective, and ask it whether its options are right.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from trainyard.config.preference_schema import SampleKind
from trainyard.core.section import Section
from trainyard.train.loss import HeadLoss, Loss

if TYPE_CHECKING:
    from trainyard.models import Batch


class Preparation(NamedTuple):
    """What an objective computes and sends in `prepare`, before the step's own passes, and keeps for that."""

    keeps_weights: bool = False
    """A copy of the trained weights of step 0."""
    forward_passes: int = 0
    """Over the whole batch."""
    summed: int = 0
    """Values that are summed over all ranks."""
    gathered: int = 0
    """Values of each pair that all ranks get."""


class Objective(Loss):
    """A loss with options in a section of the configuration."""

    is_causal = True
    samples: ClassVar[str] = ""
    """What it trains on, one of `DataSource.losses`."""
    sections: ClassVar[tuple[str, ...]] = ()
    """The sections of the configuration that it is made of; the first one has its options."""
    kind: ClassVar[SampleKind] = SampleKind()
    """What it needs of pairs."""
    variants: ClassVar[tuple[str, ...]] = ()
    """Values of the key `variant` of the first section."""
    defaults: ClassVar[dict[str, Any]] = {}
    """The keys of the first section that it has, and their values unless given."""

    def __init__(self, head_loss: HeadLoss | None, options: Section) -> None:
        super().__init__(head_loss)
        given = options.model_dump(exclude_none=True)
        self.options: dict[str, Any] = {name: given.get(name, value) for name, value in self.defaults.items()}

    @classmethod
    def sample_kind(cls, options: Section) -> SampleKind:
        """What it needs of pairs, with these options."""
        return cls.kind

    def preparation(self) -> Preparation:
        """What `prepare` takes, for plans."""
        return Preparation()

    def stand_in(self, batch: "Batch") -> "Batch":
        """The batch with numbers that a run computes otherwise. They depend on nothing but the sample, for steps that
        only show that a layout computes what others do."""
        return batch

    @classmethod
    def check(cls, given: Mapping[str, Any]) -> None:
        """Raise ValueError if the objective has not all of these keys of its section, or not a value."""
        if unknown := next((key for key in given if key not in cls.defaults), None):
            known = ", ".join(cls.defaults)
            raise ValueError(
                f"{cls.sections[0]}.{unknown}={given[unknown]}: train.objective has only {known}; nearest: null"
            )
        if (variant := given.get("variant")) and variant not in cls.variants:
            known, nearest = ", ".join(cls.variants), cls.variants[0] if cls.variants else "null"
            raise ValueError(
                f"{cls.sections[0]}.variant={variant}: train.objective has only {known}; nearest: {nearest}"
            )
