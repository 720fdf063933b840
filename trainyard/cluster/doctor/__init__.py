"""What `trainyard doctor` checks: the host, its file systems, what earlier runs left behind, and the network."""
