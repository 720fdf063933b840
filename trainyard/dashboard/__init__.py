"""The dashboard and the report that show runs: they read run directories and change nothing."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
"""What browsers get."""
