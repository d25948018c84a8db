"""Merges: how evicted slots are folded into the slots that stay."""
