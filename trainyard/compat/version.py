"""The version of torch, for features that only some versions have."""

import torch

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
