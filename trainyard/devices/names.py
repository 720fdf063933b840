"""Names that `device.name` and `device.attention` accept, known without torch so that a config is checked quickly."""

DEVICE_NAMES = ("auto", "cuda", "neuron", "xla", "cpu")
ATTENTION_KERNELS = ("auto", "cudnn", "flash", "efficient", "math")
