"""The messages of `tandem.v1.Inference`: parsed into requests, and made of answers."""
