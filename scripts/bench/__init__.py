"""`quire bench`: the commands that measure, what they send and how they report."""
