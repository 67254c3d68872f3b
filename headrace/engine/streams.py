"""Streams of a GPU: the engine computes on its own, so that nobody waits for work that is not his.

Mooncake copies rows with `cudaMemcpy`, on the device's default stream, where it waits for everything queued before it. An
engine that worked there would hold up each push until its whole forward had ended, and each write until the last decode
step had. torch's own streams do not wait for the default one, nor it for them.
"""

from __future__ import annotations

import torch


def use_own_stream(device: torch.device) -> None:
    """The calling thread's work on `device` goes to a new stream from now on; what was queued before has ended. Nothing on a
    CPU."""
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # weights and pools are made on the default stream
        torch.cuda.set_stream(torch.cuda.Stream(device))


def event_now(device: torch.device) -> torch.cuda.Event | None:
    """An event after all that the calling thread has queued; its `synchronize` sleeps, and may be called by any thread. None
    on a CPU, where what was called has happened."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
