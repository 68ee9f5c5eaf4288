"""Many replicas of a server on Ray Serve; needs the extra `ray`."""
