"""The loop: admission, scheduling, launching steps and taking them in."""
