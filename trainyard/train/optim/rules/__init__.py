"""The built-in update rules: one file each with RULE, found by its file name. No torch in here."""
