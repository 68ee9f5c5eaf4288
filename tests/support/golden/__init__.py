"""Golden files: logits of tiny models of each family, computed by transformers."""
