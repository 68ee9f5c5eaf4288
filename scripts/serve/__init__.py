"""`quire serve`: its options, its limits, and its replicas on Ray."""
