"""Peak memory: of the GPU's allocator, or of this process if there is no GPU."""

import gc

import torch


def reset() -> float:
    """Reset the peak; returns the memory in use now, in GB."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 1e9
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # sets VmHWM to the current resident memory
    return _status("VmRSS")


def most() -> float:
    """The peak in GB since the last `reset`."""
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else _status("VmHWM")


def _status(name: str) -> float:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024 / 1e9
