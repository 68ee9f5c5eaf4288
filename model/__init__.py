"""What is computed: model configurations, weights, the decoder, and what reads and plans them."""
