"""Captures what the trainyard package logs."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _LineHandler(logging.Handler):
    def __init__(self, on_line: Callable[[str], object]) -> None:
        super().__init__(logging.INFO)
        self.on_line = on_line

    def emit(self, record: logging.LogRecord) -> None:
        self.on_line(record.getMessage())


@contextmanager
def captured_log(on_line: Callable[[str], object]) -> Iterator[None]:
    """Call `on_line` with every message of level INFO or above that the package logs while the context is active."""
    logger, handler = logging.getLogger("trainyard"), _LineHandler(on_line)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
