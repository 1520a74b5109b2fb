"""Access control for clients: tenants, their roles and quotas, and the audit log of their calls."""
