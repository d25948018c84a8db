"""Attention of many queries over slots that are visible by their positions, and its gradients."""
