"""The built-in losses: one file each with LOSS, found by its file name. No torch at the top: reading a configuration
imports them."""
