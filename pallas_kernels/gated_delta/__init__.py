"""A state per head that decays, erases and writes: sequences in chunks, their gradients, and one token."""
