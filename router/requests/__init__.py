"""The life of a request inside the router, from validation to its end.

Reading order: validation, prompts, dispatch, worker_calls, stream, ends.
"""
