"""Fits of gates, which score tokens when they are written."""
