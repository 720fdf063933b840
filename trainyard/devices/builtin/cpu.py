"""CPUs."""

from trainyard.devices.kind import DeviceKind, Efficiency

DEVICE = DeviceKind(
    module="trainyard.devices.cpu:CpuDevice",
    max_logits_bytes=1 << 25,  # a larger buffer would come from fresh pages at every step
    is_host=True,
    gathers_by_all_reduce=True,
    # Its allocator returns freed memory at once: no fragmentation. Its peak rates are measured, these are guesses.
    efficiency=Efficiency(0.8, 0.4, 0.5, 1.0, 1.0),
)
