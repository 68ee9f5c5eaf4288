"""Several processes, one engine: process 0 leads, the others make its calls."""
