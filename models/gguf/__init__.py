"""GGUF files, the form of llama.cpp: metadata, tensors and tokenizer for the Hugging Face loader."""
