"""Commands that copy models and data from and to other places."""
