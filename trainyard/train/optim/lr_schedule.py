"""Learning rate as a function of the update number (1 is the first update)."""

from math import cos, isfinite, pi
from typing import Any

from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.core.user_code import check_call, describe_object, import_function, is_user_path


def learning_rate(config: Config, update: int) -> float:
    """Linear warm-up, then the schedule of config.schedule.kind; or what the user's function says."""
    peak, min_lr, schedule = config.optimizer.lr, config.schedule.min_lr, config.schedule
    if is_user_path(schedule.kind):
        function, label = import_function(schedule.kind, "schedule.kind"), f"schedule.kind={schedule.kind}"
        check_call(function, ("step", "config"), f"{label}: {function.__name__}")
        return peak * _checked_factor(function(update, config), label, update)
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


def _checked_factor(factor: Any, label: str, step: int) -> float:
    try:
        number = float(factor)
    except (TypeError, ValueError):
        number = float("nan")
    if not (isfinite(number) and number >= 0):
        shown = factor if isinstance(factor, int | float) else describe_object(factor)
        raise UserError(f"{label}: returned {shown} for step {step}; expected a factor on optimizer.lr, 0 or more")
    return number
