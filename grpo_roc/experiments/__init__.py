"""Experiments on top of the trainer, each of which writes a report."""
