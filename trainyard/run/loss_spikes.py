"""Notices steps whose loss is far above that of the steps before them."""

from collections import deque
from collections.abc import Iterable
from math import isfinite
from statistics import median

WARMUP_STEPS = 50
"""Finite losses before a spike can be noticed."""
MEAN_STEPS = 16
"""Time constant of the running mean, in steps: short, since the loss falls fast at first."""
DEVIATION_STEPS = 64
"""Steps whose deviations from the running mean the limit is made of."""
NORMAL_SIGMA = 1.4826
"""Standard deviation of normal numbers over the median of their magnitudes."""
MIN_DEVIATIONS = 6.0
"""A spike is this many standard deviations above the running mean ..."""
MIN_FRACTION = 0.05
"""... and at least this fraction of the mean above it."""


class LossSpikeDetector:
    """Compares each loss with an exponential running mean of the losses before it, and the deviation with the median
    deviation of the last steps, which neither the fast descent at the start of a run nor earlier spikes inflate.

    A loss above the limit enters the mean only as the limit, so a spike hardly changes it, and a loss that stays high
    becomes normal within a few dozen steps. Of consecutive steps above the limit, the first is the spike.
    """

    def __init__(self, losses: Iterable[float] = ()) -> None:
        """`losses` are those of earlier steps, in order, from which a resumed run starts."""
        self.count = 0
        self.mean = 0.0
        self.deviations: deque[float] = deque(maxlen=DEVIATION_STEPS)
        self.above = False
        """True if the last loss was above the limit."""
        for loss in losses:
            self.add(loss)

    def add(self, loss: float) -> float | None:
        """Add the loss of the next step. Returns the running mean if the step is a spike."""
        if not isfinite(loss):
            return None
        self.count += 1
        if self.count == 1:
            self.mean = loss
            return None
        sigma = NORMAL_SIGMA * median(self.deviations) if self.deviations else 0.0
        limit = self.mean + max(MIN_DEVIATIONS * sigma, MIN_FRACTION * abs(self.mean))
        above = self.count > WARMUP_STEPS and loss > limit
        expected = self.mean if above and not self.above else None
        self.above = above
        self.deviations.append(abs(loss - self.mean))
        self.mean += ((limit if above else loss) - self.mean) * max(1 / self.count, 1 / MEAN_STEPS)
        return expected
