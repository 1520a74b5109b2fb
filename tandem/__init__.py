"""The package that programs import; `tandem.client` is the client."""
