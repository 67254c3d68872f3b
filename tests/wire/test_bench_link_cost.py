"""The bench of links runs and counts what it says."""

from __future__ import annotations

import asyncio

from bench.link_cost import TOGETHER, measure


def test_bare_messages_and_links_are_measured_side_by_side():
    found = asyncio.run(asyncio.wait_for(measure(64), 60))
    assert found["count"] == 64 and found["bare_us"] > 0
    assert found["link_us"].keys() == {str(together) for together in TOGETHER}
    assert all(cost > 0 for cost in found["link_us"].values())
