"""Adapters of Hugging Face's PEFT: their folder, read and written, and weights that adapters are merged into."""
