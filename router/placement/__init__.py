"""Which workers serve a request, and whether it can be served as its class promises.

Reading order: queued_request, worker_state, latency_model, policy, admission, queue, scheduler.
"""
