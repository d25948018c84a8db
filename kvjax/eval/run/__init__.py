"""How a comparison runs: its cells, its batches, its log and the memory it may take."""
