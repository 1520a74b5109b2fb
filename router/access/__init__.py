"""Who may call the router: API keys, roles, quotas, and the audit log of all calls."""
