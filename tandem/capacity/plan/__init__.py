"""The answer of `tandem plan`: workers, memory and limits for a load, from the cost model and from simulated loads."""
