"""The optimized implementation. Not there yet."""
