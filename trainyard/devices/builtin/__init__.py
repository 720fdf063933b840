"""The built-in kinds of devices: one file each with DEVICE, found by its file name. No torch in here."""
