"""Attention statistics: how much every key receives, without forming the attention map."""
