"""Store: how slots are encoded. A codec turns rows of tokens into arrays and back, nothing more."""
