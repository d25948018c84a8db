"""GGUF files, the format of llama.cpp: metadata, tensors and tokenizer for the Hugging Face loader."""
