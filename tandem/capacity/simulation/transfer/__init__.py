"""KV transfers under the virtual clock."""
