"""Constants that several packages share."""

IGNORE_INDEX = -100
"""Label of positions without a loss, as in torch.nn.functional.cross_entropy."""

EXIT_INTERRUPTED = 130
"""Exit code of a rank, and of its launcher, after an orderly stop on a signal."""

MIB = 1 << 20
GIB = 1 << 30
DTYPE_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes per element of the dtypes that a configuration names."""

MAX_REDUCTION_PROGRAMS = 2112
"""Most programs among which a Triton backward kernel divides its rows: 16 for each multiprocessor of an H200. Each
leaves an fp32 partial sum of the gradient of every vector that the rows share."""
