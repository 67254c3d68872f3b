"""Between host and device without waiting: pinned memory both ways, an event to wait on where a value is really needed.

Pinned blocks come from torch's caching host allocator, which does not hand one out again before the copy that uses it
has ended; nobody here keeps them. On a CPU both ways are plain.
"""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on the device; the copy is queued on the current stream."""
    made = torch.from_numpy(np.ascontiguousarray(array))
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


class Readback:
    """Device tensors on their way to the host, as they stand when the current stream gets here."""

    def __init__(self, *tensors: torch.Tensor):
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].device.type == "cuda":
            self._host = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in tensors]
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # who waits sleeps: the core is free for the output
            self._event.record()
        else:
            self._host = [one.clone() for one in tensors]

    def wait(self) -> list[np.ndarray]:
        """The values; sleeps until they are there. Raises what the device raises."""
        if self._event is not None:
            self._event.synchronize()
        return [one.numpy() for one in self._host]
