"""The built-in loggers: one file each with LOGGER, found by its file name."""
