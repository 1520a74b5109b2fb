"""The router: turns client requests into token ids, places them on workers, and streams the answers' text back.

Reading order: `api/`, `requests/validation.py`, `placement/`, `requests/dispatch.py`, `requests/stream.py`,
`requests/ends.py`.
"""
