"""Leadership among several controllers of one cluster: one supervises the workers, the others forward to it."""
