"""Placement and admission: the choice of workers for a request, and the check that its targets can be met.

Reading order: queue, worker_state, latency_model, fleet, prefix_index, policy, prefill_reserve, scheduler.
"""
