"""Dry runs: the real Trainer as any one rank of any number, on tensors without memory and without the other ranks."""
