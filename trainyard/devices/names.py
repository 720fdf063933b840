"""Names that `device.name` and `device.attention` accept, known without torch so that a config is checked quickly."""

DEVICE_NAMES = ("auto", "cuda", "neuron", "xla", "cpu")
DEVICE_ALIASES = {
    **dict.fromkeys(("gpu", "nvidia", "h100", "h200", "a100"), "cuda"),
    **dict.fromkeys(("trainium", "trn2", "trn3", "trainium2"), "neuron"),
    **dict.fromkeys(("trn1", "trainium1"), "xla"),
}
"""Words for devices, and the name that `device.name` accepts."""
ATTENTION_KERNELS = ("auto", "cudnn", "flash", "efficient", "math")

TRAINIUM_BY_RANKS = {
    2: "trn1.2xlarge",
    4: "trn2.3xlarge",
    32: "trn1.32xlarge",
    64: "trn2.48xlarge",
    128: "trn2.48xlarge",
}
"""The instance with this many ranks; trn2 has 64 (two physical cores each) or 128."""
DEFAULT_GPU, GPUS_PER_NODE = "h100", 8
"""The GPU that a plan assumes for a foreign script, which does not name one."""


def always_compiles(device_name: str, hardware: str) -> bool:
    """True for a device that compiles every graph, with or without compile.enabled. `hardware` is that of the file."""
    return device_name == "xla" or (device_name == "auto" and "trn1" in hardware)
