"""Slow implementations, written from the definitions and not from the code they check."""
