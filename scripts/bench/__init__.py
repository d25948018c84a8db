"""Speed: of prompts, decoding, training and the host, on CPUs and accelerators."""
