"""The job queue between gateways and workers: its rules, and one module per implementation."""
