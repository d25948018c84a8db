"""Store: how slots are encoded. A codec encodes the keys or values of tokens as arrays and decodes them."""
