"""Studies: each has its data and tables in docs/, and its tests outside the plain suite (tests/studies)."""
