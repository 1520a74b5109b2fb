"""The transfer back end that uses NIXL and UCX."""
