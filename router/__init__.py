"""The router: tokenizes the prompts of client requests, places the requests on workers, and streams the answers back.

Reading order: `api/`, `requests/validation.py`, `placement/`, `requests/dispatch.py`, `requests/stream.py`,
`requests/ends.py`.
"""
