"""What is true of the request a task works on, wherever in the code it is: context variables, set at the door (`rpc/status.py`).

`request_id` is empty outside a request. `traceparent` is the W3C header of the span that new spans and outgoing calls
belong to; empty when there is none.
"""

from __future__ import annotations

import contextvars

request_id_var: contextvars.ContextVar[str] = contextvars.ContextVar("headrace_request_id", default="")
traceparent_var: contextvars.ContextVar[str] = contextvars.ContextVar("headrace_traceparent", default="")
