"""From the engine's outputs to bodies and events, one file a protocol."""
