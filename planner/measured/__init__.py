"""What probes saw of a machine and of a job, and how it corrects memory and time."""
