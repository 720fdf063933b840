"""The dashboard and the report that show runs: they read run directories and change nothing."""
