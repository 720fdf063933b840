"""Learning rate as a function of the update number (1 is the first update)."""

from math import cos, pi

from trainyard.config.schema import Config


def learning_rate(config: Config, update: int) -> float:
    """Linear warm-up, then the schedule of config.schedule.kind."""
    peak, min_lr, schedule = config.optimizer.lr, config.schedule.min_lr, config.schedule
    if update < schedule.warmup_steps:
        return peak * update / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "wsd":
        length = schedule.decay_steps or max(config.train.steps // 10, 1)
        start, end = config.train.steps - length, config.train.steps
    else:
        start, end = schedule.warmup_steps, schedule.decay_steps or config.train.steps
    progress = min(max((update - start) / max(end - start, 1), 0.0), 1.0)
    factor = (1 + cos(pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
    return min_lr + (peak - min_lr) * factor
