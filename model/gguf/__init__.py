"""GGUF files, the format of llama.cpp."""
