"""Faults under load: one after the other (chaos), and for half an hour (soak)."""
