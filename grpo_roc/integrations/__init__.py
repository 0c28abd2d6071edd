"""The service in other trainers: the smallest adapter for each. None needs torch or this trainer's loop.

EXEC_URL is the address of the service.
"""
