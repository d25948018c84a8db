"""Store: how slots are encoded. A codec turns the keys or values of tokens into arrays and back."""
