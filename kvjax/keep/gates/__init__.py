"""Gates: fitted networks that score tokens when they are written."""
