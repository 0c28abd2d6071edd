"""Shared by all load tools: programs, processes, Redis servers, CPU meters, results."""
