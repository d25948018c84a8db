"""State: the cache as a pytree (`Cache`, `Slots`, `Paged`, `Codes`, `State`), its writes and its sharding."""
