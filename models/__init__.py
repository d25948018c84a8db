"""Decoders: one file per architecture family, `hf.py` for reading and writing weights, `zoo/` for the small
model that ships with the package. What a decoder keeps of its past belongs to the cache and the methods.
"""
