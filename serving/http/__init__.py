"""Requests over HTTP, and everything a server owes to those who send them."""
