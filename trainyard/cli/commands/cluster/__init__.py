"""Commands for runs as jobs of a cluster: submit, supervise, jobs, logs, cancel."""
