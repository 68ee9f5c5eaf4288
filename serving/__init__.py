"""Who is served when: requests, the cache, the engine and the servers around it."""
