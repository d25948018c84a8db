"""Fits of merges and of states that replace evicted slots."""
