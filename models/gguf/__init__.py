"""GGUF files, the form of llama.cpp: metadata, tensors and tokenizer, as our Hugging Face loader takes them."""
