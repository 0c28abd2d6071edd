"""Benchmarks: the arms in turns, two source trees in pairs, the path without programs."""
