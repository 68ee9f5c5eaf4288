"""Device code: batch arrays, the state, the compiled step, page copies, expert placement."""
