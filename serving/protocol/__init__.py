"""The wire formats of the HTTP APIs: bodies to requests, results to bodies, as pure functions."""
