"""Recorded results of other implementations, and the scripts that record them."""
