"""How many generated cases a property test runs: all of them nightly, a fraction in the fast tier."""

import os

from hypothesis import HealthCheck, settings

SCALE = float(os.environ.get("TRAINYARD_EXAMPLES", "0.15"))
"""Fraction of each test's examples to run. `make test-all` sets 1; set 10 for a deep search."""


def examples(count: int, **options: object) -> settings:
    """Hypothesis settings for a test whose full tier runs `count` examples."""
    options.setdefault("suppress_health_check", [HealthCheck.too_slow])
    return settings(max_examples=max(3, round(count * SCALE)), deadline=None, **options)  # type: ignore[arg-type]
