"""Base of all operations: dispatch, dtypes, rotation, softmax, packed sequences and bit packing."""
