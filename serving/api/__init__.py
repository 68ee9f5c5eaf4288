"""What callers give and get: options, parameters, outputs and errors. No file here imports JAX."""
