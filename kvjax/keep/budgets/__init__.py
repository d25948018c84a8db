"""Budgets: how many slots each layer and each KV head keeps."""
