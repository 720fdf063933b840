"""The built-in families, one file each."""
