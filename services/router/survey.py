"""What a set of ranks amounts to: what they can hold, why they cannot serve, how an operator sees them."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import Unavailable
from headrace.protocol.common import WorkerRole
from headrace.protocol.router import WorkerView
from services.router.limits import Capacity
from services.router.rank import RankView

ROLES = (WorkerRole.PREFILL, WorkerRole.DECODE)


def role_name(role: WorkerRole) -> str:
    """As the registry and people call it."""
    return role.name.lower()


def capacity(ranks: Sequence[RankView]) -> Capacity | None:
    """What those that are ready could hold together; None without one of each role."""
    ready = [(x.role, x.info) for x in ranks if x.is_ready and x.info is not None]
    prefills = [info for role, info in ready if role is WorkerRole.PREFILL]
    decodes = [info for role, info in ready if role is WorkerRole.DECODE]
    if not prefills or not decodes:
        return None
    return Capacity(
        max_context_tokens=min(
            max([x.max_context_tokens for x in prefills]), max([x.max_context_tokens for x in decodes])
        ),
        prefill_blocks=max([x.block_count for x in prefills]),
        decode_blocks=max([x.block_count for x in decodes]),
        block_size=decodes[0].layout.block_size,
        max_batch_size=max([x.max_batch_size for x in decodes]) or 2**31,
    )


def unavailable(ranks: Sequence[RankView]) -> Unavailable:
    """Why no request can be served by them now."""
    reasons = [f"{role_name(x.role)} {x.identity.address}: {x.why_not_ready()}" for x in ranks if not x.is_ready]
    known = {x.role for x in ranks}
    reasons += [f"no {role_name(role)} rank is known" for role in ROLES if role not in known]
    text = "; ".join(reasons) or "those that are ready do not share a KV layout"
    return Unavailable(f"no prefill and decode pair is ready: {text}", reason="NO_WORKERS", retry_after_s=1.0)


def views(ranks: Sequence[RankView]) -> tuple[WorkerView, ...]:
    """Every rank that has answered, by address."""
    found = [view for rank in ranks if (view := rank.view()) is not None]
    return tuple(sorted(found, key=lambda view: (view.info.identity.address, role_name(view.info.role))))
