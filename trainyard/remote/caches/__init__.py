"""Where copies of them are kept."""
