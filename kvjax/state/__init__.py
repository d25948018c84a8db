"""State: the cache as a pytree (`Cache`, `Slots`, `Pages`, `Paged`, `Codes`, `State`), its writes and its sharding."""
