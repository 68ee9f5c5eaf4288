"""`quire bench`: benchmark commands."""
