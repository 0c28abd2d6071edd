"""Judging programs and verifying answers."""
