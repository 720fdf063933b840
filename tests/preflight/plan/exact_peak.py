"""Exact peak memory of a dry run: storage by storage, for torch's operations one by one, at any size."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from tests.support.meta_op_mode import MetaOpMode
from trainyard import compat
from trainyard.config.schema import Config
from trainyard.devices.meta import MetaDevice
from trainyard.devices.neuron.device import NeuronDevice
from trainyard.preflight.dryrun.dry_run import dry_run
from trainyard.preflight.dryrun.live_memory import LiveBytes
from trainyard.preflight.dryrun.meta_ops import tensors_in

FLASH = compat.ATTENTION_KERNELS[False, SDPBackend.FLASH_ATTENTION.value]


class LiveMode(MetaOpMode):  # type: ignore[no-untyped-call]
    """Tracks the result of every operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = LiveBytes(torch.device("meta"))

    def observe(self, function: Any, args: Any, out: Any) -> None:
        for tensor in tensors_in(out):
            self.live.track(tensor, "")


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Attention as one operator, as on a CPU, a GPU and Trainium. The meta device would decompose it."""
    bias = None if mask is None else torch.zeros_like(mask, dtype=q.dtype)
    return FLASH.forward(q, k, v, options.get("is_causal", False), bias, options.get("scale"))[0]


def exact_peak(config: Config, rank: int, ranks: int) -> int:
    """Peak bytes of the second step, with the chunks of logits that Trainium has."""
    mode, device = LiveMode(), MetaDevice()
    device.kind = replace(device.kind, max_logits_bytes=NeuronDevice.kind.max_logits_bytes)
    with (
        patch.object(F, "scaled_dot_product_attention", flash_attention),
        patch.object(compat, "select_attention_kernel", lambda *_: FLASH),
        mode,
        dry_run(config, rank, ranks, device) as trainer,
    ):
        for model in trainer.models:
            model.train()
        batch = trainer.loader.batch(0, trainer.batch_slice)
        for step in (1, 2):
            mode.live.begin_phase()
            trainer.train_step(batch, step, 1e-3)
            trainer.optimizer.wait_for_weights()
    return mode.live.peak
