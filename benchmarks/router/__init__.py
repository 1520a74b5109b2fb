"""The router alone, between a stand-in worker and clients in other processes."""
