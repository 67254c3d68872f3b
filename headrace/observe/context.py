"""What is true of the request a task works on, wherever in the code it is: context variables, set at the door (`rpc.py`).

`request_id` is empty outside a request. `traceparent` is the W3C header of the span that new spans and outgoing calls
belong to; empty when there is none.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

request_id_var: contextvars.ContextVar[str] = contextvars.ContextVar("headrace_request_id", default="")
traceparent_var: contextvars.ContextVar[str] = contextvars.ContextVar("headrace_traceparent", default="")


@contextlib.contextmanager
def calling(request_id: str, traceparent: str) -> Iterator[None]:
    """Inside, outgoing calls and log lines carry this request id and trace parent."""
    tokens = (request_id_var.set(request_id), traceparent_var.set(traceparent))
    try:
        yield
    finally:
        request_id_var.reset(tokens[0])
        traceparent_var.reset(tokens[1])
