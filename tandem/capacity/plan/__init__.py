"""The answer of `tandem plan`: workers, memory and limits for a load, by the cost model and by simulated loads."""
