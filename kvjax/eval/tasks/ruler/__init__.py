"""RULER's 13 synthetic tasks, generated offline at any length for any tokenizer (arXiv:2404.06654)."""
