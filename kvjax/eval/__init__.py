"""Tasks, the comparison runner and its reports."""
