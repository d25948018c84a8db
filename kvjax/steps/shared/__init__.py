"""Shared by prefill and step: the static run, rotation of slots, fitted arrays."""
