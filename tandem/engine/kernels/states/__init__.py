"""State layers: the short causal convolution, the linear recurrence, and the gated norm of its output."""
