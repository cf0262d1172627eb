"""Scripts that run in the training Python. They import nothing of ours; each prints one JSON document."""
