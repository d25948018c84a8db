"""Decoders: `transformer.py` runs the layers of a `Config`, whose mixers lie in `mixers`, one idea per file.

`hf.py` and the files named after it read and write Hugging Face checkpoints (`hf_mixed`: those of layers of
several kinds), `gguf` reads GGUF files, and `zoo` has the models that ship. Which slots of its past a decoder
keeps is decided by the methods (`kvjax.methods`).
"""
