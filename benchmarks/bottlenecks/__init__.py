"""Is `tandem why` right? Loads built so that one bottleneck binds, on a real cluster."""
