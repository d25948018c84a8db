"""Merges: what the slots that stay take over from evicted slots."""
