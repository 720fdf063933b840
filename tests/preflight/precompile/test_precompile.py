"""What the report of `precompile` says of a rank that failed."""

import pytest

from trainyard.preflight.precompile.precompile import first_error

CHAINED = """[rank0]:[W1118 14:55:28.261127885 ProcessGroup.hpp:1006] Warning: No backend of type 0 found
[rank0]: Traceback (most recent call last):
[rank0]:   File "stage.py", line 892, in forward_one_chunk
[rank0]: torch._dynamo.exc.Unsupported: HOP: Unsafe side effect
[rank0]:   Hint: avoid it
[rank0]: The above exception was the direct cause of the following exception:
[rank0]: RuntimeError:
[rank0]:             [Stage 0] failed to run forward:
[rank0]:
"""


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (CHAINED, "torch._dynamo.exc.Unsupported: HOP: Unsafe side effect"),
        ('Traceback (most recent call last):\n  File "a.py"\nValueError: no loss today\n', "ValueError: no loss today"),
        ("FutureWarning: soon gone\nTraceback (most recent call last):\nKeyError: 'x'\n", "KeyError: 'x'"),
        ("", None),
        ("Killed\n", None),
    ],
)
def test_the_first_exception_of_a_log_is_the_cause(log: str, error: str | None) -> None:
    assert first_error(log) == error
