"""Observations: what layers record for scores while they read a prompt or take a step."""
