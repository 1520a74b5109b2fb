"""The gRPC API `tandem.v1.Inference`: its messages are parsed into requests, and answers become messages."""
