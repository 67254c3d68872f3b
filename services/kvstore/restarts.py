"""Workers that were started again: what earlier processes at their addresses published is gone."""

from __future__ import annotations

from headrace.errors import Unavailable
from headrace.process.registry import Registry
from services.kvstore.core import KvStore

WORKER_ROLES = ("prefill", "decode")


async def follow_restarts(registry: Registry, core: KvStore) -> None:
    """Tells the core which process is at each worker address now."""
    told: dict[str, str] = {}
    while True:
        version = registry.version
        try:
            for worker in (member.identity for role in WORKER_ROLES for member in registry.members(role)):
                if told.get(worker.address) != worker.epoch:
                    await core.worker_seen(worker)
                    told[worker.address] = worker.epoch
        except Unavailable:
            version = -1  # again when Redis answers
        await registry.wait_change(1.0, since=version if version >= 0 else None)
