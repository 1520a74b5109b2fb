"""Commands that send requests: `tandem generate`, `tandem chat`."""
