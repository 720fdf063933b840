"""Skips steps that are not finite, without a synchronization between host and device, and clips the others."""

import torch
from torch import Tensor


class StepGuard:
    """Counts updates and skipped steps on the device. A step whose loss or gradient norm is not finite is skipped: the
    update rules change nothing where `finite` is false."""

    def __init__(self, names: list[str], max_grad_norm: float, device: torch.device) -> None:
        """`max_grad_norm` 0 disables clipping."""
        self.names, self.max_grad_norm = names, max_grad_norm
        self.update_count = torch.zeros((), device=device)
        """Updates so far without skipped steps, for the bias correction of the moments."""
        self.skip_counts = torch.zeros(2, dtype=torch.int32, device=device)
        """Skipped steps in total and in a row."""
        self.skipped_grad_norms = torch.zeros(len(names), device=device)
        """Squared gradient norm of each parameter at the last skipped step."""

    def check(self, squared_norms: Tensor, norm: Tensor, loss: Tensor) -> Tensor:
        """Count this step as an update or as skipped. Returns the flag `finite`."""
        finite = norm.isfinite() & loss.isfinite()
        self.update_count += finite
        skipped = (~finite).int()
        self.skip_counts = torch.stack((self.skip_counts[0] + skipped, (self.skip_counts[1] + 1) * skipped))
        self.skipped_grad_norms = torch.where(finite, self.skipped_grad_norms, squared_norms)
        return finite

    def clip(self, norm: Tensor, grad_scale: Tensor) -> Tensor:
        """The factor on gradients that limits their global norm to `max_grad_norm`."""
        if not self.max_grad_norm:
            return grad_scale
        return grad_scale * (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)

    def nonfinite_names(self) -> list[str]:
        """Parameters with a non-finite gradient at the last skipped step. Synchronizes with the device."""
        norms = zip(self.names, self.skipped_grad_norms.tolist(), strict=True)
        return [name for name, norm in norms if not abs(norm) < float("inf")]
