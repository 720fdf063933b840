"""Commands that write and show configuration files."""
