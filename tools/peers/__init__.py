"""Other engines on the same work: their environments, and a worker that runs inside each."""
