"""Constants that several packages share."""

IGNORE_INDEX = -100
"""Label of positions without a loss, as in torch.nn.functional.cross_entropy."""
