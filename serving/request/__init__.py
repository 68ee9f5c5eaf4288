"""A request and its sequences: tokens, text, grammars, embeddings, scores."""
