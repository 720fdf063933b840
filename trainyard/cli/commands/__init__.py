"""The commands of `trainyard`, one module each. `cli/main.py` imports the one that runs."""
