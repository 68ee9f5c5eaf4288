"""Other engines on the same work: their environments, a worker that runs inside each, and what it measures."""
