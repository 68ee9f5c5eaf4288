"""The HTTP server: connections, admission, models, and the path from a request to its answer."""
