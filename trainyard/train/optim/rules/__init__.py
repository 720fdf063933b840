"""Update rules: what a step does with gradients, by `optimizer.kind`."""
