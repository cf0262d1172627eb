"""What is asked: the job, the machine, the stack and the model, from flags, files, NVML and other Pythons."""
