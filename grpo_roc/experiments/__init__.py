"""Experiments and reports on top of the trainer."""
