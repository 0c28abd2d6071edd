"""Metrics, traces, logs and the statistics of the live page."""
