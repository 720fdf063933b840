"""Byte ranges of objects, kept on this host in files of one size."""
