"""Trainyard: pre-train language models on any number of devices from one YAML file."""

__version__ = "0.1.0"
