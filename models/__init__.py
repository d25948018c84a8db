"""Decoders: `transformer.py` runs the layers of a `Config`, whose mixers are in `mixers`, one idea per file.

`hf.py` and the files named after it read and write Hugging Face checkpoints (`hf_mixed`: those with layers of
several kinds), `gguf` reads GGUF files, and `zoo` has the shipped models. Methods (`kvjax.methods`) decide
which slots of its past a decoder keeps.
"""
