"""`quire train-heads`: train draft heads (Medusa, EAGLE, EAGLE-3) on a model's own outputs."""
