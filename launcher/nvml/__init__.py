"""NVML: the cards of this machine, their links and which of them a process sees, through the real ``pynvml``."""
