"""The prefill half of a worker: prompts in chunks, the first token, and the hand-over of both."""
