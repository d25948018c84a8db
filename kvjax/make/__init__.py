"""What a method makes of a model before anything is read: other weights, under another config."""
