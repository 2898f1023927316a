"""The package's side of the page: messages in, runs, messages and records out."""
