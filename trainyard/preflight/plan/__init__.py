"""Memory, speed and cost of a run, predicted without a device.

`trace` runs a stage of the real model on shapes, `memory` estimates the peak of a rank, `time` counts messages and
predicts the step, `hardware` has the catalog of devices. `report` combines them for one configuration, `search` for
every layout that fits, `compare_measured` compares with a finished run, `preflight` finds what would fail, `fit_check`
is the memory check of `trainyard train`.
"""
