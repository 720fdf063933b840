"""What a run will need and how fast it will be, worked out before a device is touched.

`messages` says what ranks send, `memory` what they hold, `time` how long a step takes; `hardware` is the table of what
one may run on. `report` puts them together for one file, `search` for every layout that fits, `compare` against what a
run has measured; `checks` finds what would fail. `published` holds the speeds that the few constants are fitted on.
"""
