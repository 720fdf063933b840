"""The built-in wrappers of linear layers, one file each."""
