"""Names of the files and directories of native checkpoints. Imports no torch: pages that list checkpoints need none."""

import re

COMMIT_FILE = "complete.json"
STEP_DIRECTORY = re.compile(r"step_(\d{8,})")


def step_directory(step: int) -> str:
    return f"step_{step:08d}"


def shard_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"
