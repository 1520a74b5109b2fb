"""Tenants, their roles and quotas, and the audit log of their calls."""
