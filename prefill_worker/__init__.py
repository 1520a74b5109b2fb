"""The prefill phase of a worker: computes prompts in chunks, and hands over their KV and first token."""
