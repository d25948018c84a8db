"""What all operations share: which form runs, dtypes, rotation, softmax, packed sequences and packed bits."""
