"""Make: rewrites of a model before anything is read: other weights, under another config."""
