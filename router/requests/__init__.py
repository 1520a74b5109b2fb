"""One request from its validation to its end.

Reading order: validation, prompts, dispatch, worker_calls, stream, ends.
"""
