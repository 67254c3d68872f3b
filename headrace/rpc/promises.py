"""Promises as they travel: bytes, and a code over exactly those bytes under the key of the mesh.

A mesh has up to two keys, so that a new one can be given to every process before the old one goes. Without keys codes are empty and
nothing is checked: on one host, where nobody else can speak to the processes.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError, InvalidRequest
from headrace.protocol.decode import Promise, Reservation
from headrace.wire.decode import promise_from_bytes, promise_to_bytes

MAX_KEYS = 2
MIN_KEY_BYTES = 16
KEY_BYTES = 32
"""Of a key that we make."""


@dataclass(frozen=True)
class MeshKeys:
    """Keys of the mesh, newest first; at most MAX_KEYS."""

    keys: tuple[bytes, ...] = ()

    @classmethod
    def make(cls, path: Path) -> MeshKeys:
        """One new key, written to a file that only its owner may read and that was not there or is replaced."""
        path.unlink(missing_ok=True)
        keys = cls((secrets.token_bytes(KEY_BYTES),))
        with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(keys.keys[0].hex() + "\n")
        return keys

    @classmethod
    def load(cls, path: str) -> MeshKeys:
        """Keys from a file of hexadecimal lines that only its owner may read; an empty path means none. Raises ConfigError."""
        if not path:
            return cls()
        try:
            if stat.S_IMODE(Path(path).stat().st_mode) & 0o077:
                raise _bad(f"{path} can be read by others: chmod 600")
            keys = tuple(bytes.fromhex(line) for line in Path(path).read_text().split())
        except (OSError, ValueError) as error:
            raise _bad(f"{path} cannot be read as hexadecimal lines: {type(error).__name__}") from error
        if not 1 <= len(keys) <= MAX_KEYS or min(map(len, keys)) < MIN_KEY_BYTES:
            raise _bad(f"{path} must hold 1 to {MAX_KEYS} keys of at least {MIN_KEY_BYTES} bytes")
        return cls(keys)


def sign(promise: Promise, expires_in_s: float, *, keys: MeshKeys) -> Reservation:
    """What a router carries to the writer; `expires_in_s` is the rank's, from now."""
    data = promise_to_bytes(promise)
    code = hmac.digest(keys.keys[0], data, "sha256") if keys.keys else b""
    return Reservation(data, code, expires_in_s)


def verify(reservation: Reservation, keys: MeshKeys) -> Promise:
    """The promise. Raises InvalidRequest: PROMISE_FORGED when no key of ours made its code, INVALID_REQUEST when it is no promise."""
    data, code = reservation.promise, reservation.code
    if keys.keys and not any([hmac.compare_digest(hmac.digest(key, data, "sha256"), code) for key in keys.keys]):
        raise InvalidRequest("reservation: its code is not of this mesh", field="reservation", reason="PROMISE_FORGED")
    return promise_from_bytes(data)


def _bad(what: str) -> ConfigError:
    return ConfigError(f"mesh.key_file: {what}", field="mesh.key_file")
