"""A stage of the real model, run forward and backward on tensors without memory: what it keeps, sends and computes."""
