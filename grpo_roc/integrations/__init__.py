"""The service in other trainers: the smallest adapter for each. None of them needs torch or this trainer's loop.

The address is EXEC_URL, else the client's own default.
"""
