"""Makes what is published; not in the wheel."""
