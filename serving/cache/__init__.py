"""Which pages hold which tokens: on the host, without JAX."""
