"""The product kernel of decode steps, compiled for a GPU that is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOPPER_SHARED_BYTES = 227 * 1024


@pytest.mark.nightly
def test_configurations_fit_and_load_weights_before_they_wait() -> None:
    script = Path(__file__).with_name("compile_decode_products.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert len(lines) == 20
    for line in lines:
        *_, shared_bytes, loads_before_wait = line.split()
        assert int(shared_bytes) <= HOPPER_SHARED_BYTES, line
        assert loads_before_wait == "True", line
