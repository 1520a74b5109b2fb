"""Commands that ask a model: `tandem generate`, `tandem chat`."""
