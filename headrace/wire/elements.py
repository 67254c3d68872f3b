"""How many elements a message would have, counted in its bytes before anything is made of them.

Two bytes on the wire can be one element of a hundred bytes in memory: 16 MiB of them are more than a process may have. So bytes of
strangers are walked before they are parsed. Small ones are not: what fits SMALL_BYTES cannot do harm, and costs nothing here.
"""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidRequest

SMALL_BYTES = 64 * 1024
MAX_ELEMENTS = 32 * 1024
"""Fields, entries and messages in all. A prompt of any length is one element: ids are packed."""
MAX_DEPTH = 64
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def check_elements(descriptor: Any, data: bytes, limit: int = MAX_ELEMENTS) -> None:
    """Raises InvalidRequest (REQUEST_SIZE) when `data`, as a message of `descriptor`, holds more than `limit` elements.

    Bytes that are no message pass: who parses them says so.
    """
    if len(data) <= SMALL_BYTES:
        return
    try:
        _count(descriptor, memoryview(data), limit, 0)
    except (IndexError, KeyError):
        return


def _count(descriptor: Any, data: memoryview, left: int, depth: int) -> int:
    """How many more elements may come after those of `data`. Raises InvalidRequest, and IndexError or KeyError for nonsense."""
    messages = {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}
    at = 0
    while at < len(data):
        left -= 1
        if left < 0 or depth > MAX_DEPTH:
            raise InvalidRequest("the request has too many elements", field="request", reason="REQUEST_SIZE")
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _BYTES:
            size, at = _varint(data, at)
            inner = messages.get(key >> 3)
            if inner is not None:
                left = _count(inner, data[at : at + size], left, depth + 1)
            at += size
        else:
            at += {_FIXED64: 8, _FIXED32: 4}[kind]
    return left


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError("a varint of more than ten bytes")
