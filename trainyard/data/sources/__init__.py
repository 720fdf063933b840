"""The built-in data sources: one file each with SOURCE, found by its file name, which is the value of data.source.

Reading a configuration imports them, so libraries are imported where they are used.
"""
