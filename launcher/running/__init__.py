"""A run that goes on: its owner, what watches and ends it, what follows it, and what comes after an out-of-memory."""
