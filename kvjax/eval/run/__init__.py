"""Running a comparison: its cells, its batches, its log and its memory."""
