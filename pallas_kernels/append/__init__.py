"""Writing one slot of many lists, in place."""
