"""Uploads of runs and checkpoints: to the Hub with a model card, and to object stores with a manifest."""
