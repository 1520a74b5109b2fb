"""The engine: one model, one paged KV cache, one step at a time: `ModelRunner.run(StepBatch) -> ModelRunnerOutput`."""
