import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests make their own models; nothing is fetched
os.environ.setdefault("COLUMNS", "200")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run on the CPU then
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what it runs in the background so
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.manual_seed(0)
