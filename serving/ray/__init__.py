"""Several replicas of the server on Ray Serve, behind one front that routes by prefix; needs the
extra `ray`.
"""
