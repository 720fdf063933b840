"""Losses as (sum, count) pairs: the loss of a step is each term's sum over its count in the global batch, in fp32.

Means of micro batches are never averaged, so neither the micro batch size nor the number of ranks changes the loss.
Labels of IGNORE_INDEX do not count. No torch at the top: families name a loss, and ask for its attributes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainyard.core.constants import IGNORE_INDEX
from trainyard.families.family import LOSSES

if TYPE_CHECKING:
    from torch import Tensor

    from trainyard.models import Batch, ModelConfig, ModelOutput
    from trainyard.train.micro_batches.runner import MicroBatchRunner

LossTerms = dict[str, "tuple[Tensor, Tensor]"]
"""(sum, count) of each term."""
LossFunction = Callable[["ModelOutput", "Batch"], "tuple[Tensor, Tensor]"]
"""A user's loss: (output, batch) to (sum, count)."""
HeadLoss = Callable[..., "Tensor"]
"""(output, labels) to the cross entropy summed over all labels except IGNORE_INDEX; with per_token=True, that of each
label, in their shape."""


class Loss:
    """What a step minimizes. A subclass is the loss of a model family (`Family.loss`), or that of a run: `train.loss`
    names it, or gives it as `module:Class`."""

    term_names: tuple[str, ...] = ()
    """Names of the terms; the loss is their sum, and each is a metric."""
    metric_names: tuple[str, ...] = ()
    """Names of what `terms` has besides, to report its means."""
    is_causal: bool = False
    """It trains a model to predict the next token, which can therefore generate text."""

    def __init__(self, head_loss: HeadLoss | None = None) -> None:
        """`head_loss` multiplies by the output weights and computes the cross entropy in one function, one chunk of
        tokens at a time."""
        if head_loss is None:
            from trainyard.train.cross_entropy import chunked_cross_entropy

            head_loss = chunked_cross_entropy
        self.head_loss: HeadLoss = head_loss

    def configure(self, model: "ModelConfig") -> None:
        """Learn what outputs of this model have, before anything asks for names."""

    def prepare(self, runner: "MicroBatchRunner", batches: "list[Batch]", rng_key: "Tensor") -> None:
        """Compute what the loss of any micro batch needs of all of them; `batches` are those of this rank on the
        device. All ranks call this before each step and each batch of an evaluation."""

    def label_counts(self, batch: "Batch") -> "list[Tensor]":
        """Counted labels of each term; empty if they are known only after the forward pass, for all terms together."""
        raise NotImplementedError

    def terms(self, output: "ModelOutput", batch: "Batch") -> LossTerms:
        """Sum and count of each term and metric over this batch."""
        raise NotImplementedError


class UserLoss(Loss):
    """A user's function (output, batch) -> (sum, count). Its count is known after the forward pass and divides the
    gradients."""

    term_names = ("loss",)

    def __init__(self, function: LossFunction) -> None:
        self.function = function

    def label_counts(self, batch: "Batch") -> "list[Tensor]":
        return []

    def terms(self, output: "ModelOutput", batch: "Batch") -> LossTerms:
        from trainyard.train.user_functions import check_sum_and_count

        return {"loss": check_sum_and_count(self.function(output, batch), self.function)}


def make_loss(name: str, head_loss: HeadLoss) -> Loss:
    """The loss with this name."""
    loss: Loss = LOSSES.find(name)(head_loss)
    return loss


def count_labels(labels: "Tensor") -> "Tensor":
    """Number of labels other than IGNORE_INDEX, in fp32."""
    return (labels != IGNORE_INDEX).sum().float()
