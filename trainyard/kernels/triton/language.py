"""Triton, or a placeholder where it is not installed: shapes of the kernels' results are known without it, so that a
plan for a GPU needs neither."""

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:

    class _Placeholder:
        """Accepts decorators and annotations of kernels, which never run."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args and callable(args[0]) else self

    triton = tl = _Placeholder()

__all__ = ["tl", "triton"]
