"""Where files come from: the Hub, object stores, the web."""
