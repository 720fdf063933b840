"""Runs as jobs of a cluster: submit them to Slurm, supervise them, and look after them."""
