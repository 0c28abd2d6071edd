"""The command line: one file per command, each with `add` (its arguments) and `run` (what it does).

`main` imports every command file, so these files import slow modules (FastAPI, the worker, Celery) inside their functions.
"""
