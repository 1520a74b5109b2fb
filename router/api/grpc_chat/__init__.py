"""Conversations over gRPC: messages, tools, and the parts of an answer, in the schema of `tandem.v1.Inference`."""
