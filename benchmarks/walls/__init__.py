"""Is `tandem why` right? Loads built so that one wall binds, on a real cluster."""
