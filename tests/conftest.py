import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests make their own models; nothing is fetched
os.environ.setdefault("COLUMNS", "200")

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.manual_seed(0)
