"""Memory, speed and cost of a run, predicted without a device.

`trace` runs a stage of the real model on shapes, `memory` estimates the peak of a rank, `time` counts messages and
predicts the step, `hardware` has the catalog of devices. `report` combines them for one configuration, `search` for
every layout that fits, `compare_measured` compares with a finished run, `problems` finds what would fail, for
`trainyard plan` and, as far as memory is concerned, for `trainyard train`.
"""
