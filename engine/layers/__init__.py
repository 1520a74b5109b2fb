"""Layer components without weights."""
