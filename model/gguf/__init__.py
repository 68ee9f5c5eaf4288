"""GGUF, llama.cpp's one-file format: weights, sizes and tokenizer, turned into what this package reads."""
