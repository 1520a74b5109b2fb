"""Every way to share GPUs between prefill and decode, under the same loads."""
