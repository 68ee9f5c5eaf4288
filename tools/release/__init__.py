"""Makes what is published."""
