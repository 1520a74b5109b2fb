"""The transfer over NIXL and UCX."""
