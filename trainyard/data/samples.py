"""Samples: what a dataset returns and a loader turns into a batch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Sample = dict[str, NDArray[Any]]
"""Stacked samples, by field of `core.batch.Batch`: arrays [samples, ...], int32 except for fields that are fp32."""


def document_ids(document_starts: NDArray[np.bool_]) -> Sample:
    """The fields `document_ids` and `position_ids` from a mask [samples, tokens] of the first token of each document.

    The first token of a sample always starts a document.
    """
    starts = document_starts.copy()
    starts[:, 0] = False
    positions = np.arange(starts.shape[1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(starts, positions, 0), axis=1)
    return {"document_ids": starts.cumsum(1, dtype=np.int32), "position_ids": (positions - first).astype(np.int32)}
