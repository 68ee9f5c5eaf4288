"""The HTTP server: connections, admission, models, and the way of a request from its bytes to its answer."""
