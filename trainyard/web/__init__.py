"""What the servers of this package share: sockets on loopback, tokens, signals, limits of requests."""
