"""`quire serve`: command-line options, checks of limits, and replicas on Ray Serve."""
