"""The engine runs one model over one paged KV cache: `ModelRunner.run(StepBatch) -> ModelRunnerOutput`."""
