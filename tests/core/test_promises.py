"""Promises of room: signed over exactly their bytes, under one of two keys that a file of the owner's holds."""

from __future__ import annotations

import dataclasses
import stat

import pytest

from headrace.errors import ConfigError, InvalidRequest
from headrace.protocol.common import TransferBackend, WorkerIdentity
from headrace.protocol.decode import Promise, Reservation, TargetDescriptor, TargetSequence
from headrace.rpc.promises import MeshKeys, sign, verify
from headrace.wire.decode import promise_to_bytes

PROMISE = Promise(
    "r1",
    "q",
    2,
    WorkerIdentity("10.0.0.1:1", "d" * 16),
    WorkerIdentity("10.0.0.2:1", "e" * 16),
    TargetDescriptor(TransferBackend.MOONCAKE, "s", 1 << 40, 4096, 512, 32, 16, 2, 8),
    (TargetSequence(0, 0, 20, (3, 4)),),
    "f" * 64,
)
OLD, NEW, FOREIGN = (MeshKeys((bytes([value]) * 32,)) for value in (1, 2, 3))


def forged(reservation: Reservation, keys: MeshKeys) -> str:
    with pytest.raises(InvalidRequest) as caught:
        verify(reservation, keys)
    return caught.value.reason


def test_a_promise_comes_back_as_it_was_made():
    reservation = sign(PROMISE, 10.0, keys=NEW)
    assert verify(reservation, NEW) == PROMISE and (len(reservation.code), reservation.expires_in_s) == (32, 10.0)


def test_one_byte_more_or_other_is_a_forgery():
    reservation = sign(PROMISE, 10.0, keys=NEW)
    other = promise_to_bytes(dataclasses.replace(PROMISE, sequences=(TargetSequence(0, 0, 20, (3, 5)),)))
    for promise in (other, reservation.promise + b"\x00", b""):
        assert forged(dataclasses.replace(reservation, promise=promise), NEW) == "PROMISE_FORGED"
    for code in (b"", reservation.code[:-1], bytes(32)):
        assert forged(dataclasses.replace(reservation, code=code), NEW) == "PROMISE_FORGED"


def test_two_keys_are_accepted_while_a_mesh_changes_them_and_the_newest_signs():
    both = MeshKeys((*NEW.keys, *OLD.keys))
    assert verify(sign(PROMISE, 1.0, keys=OLD), both) == verify(sign(PROMISE, 1.0, keys=NEW), both) == PROMISE
    assert sign(PROMISE, 1.0, keys=both).code == sign(PROMISE, 1.0, keys=NEW).code
    assert forged(sign(PROMISE, 1.0, keys=FOREIGN), both) == "PROMISE_FORGED"
    assert forged(sign(PROMISE, 1.0, keys=MeshKeys()), both) == "PROMISE_FORGED"


def test_a_mesh_without_keys_signs_nothing_and_still_reads_only_promises():
    reservation = sign(PROMISE, 1.0, keys=MeshKeys())
    assert reservation.code == b"" and verify(reservation, MeshKeys()) == PROMISE
    assert forged(Reservation(b"\xff", b"", 1.0), MeshKeys()) == "INVALID_REQUEST"


def test_a_key_file_is_made_for_its_owner_alone_and_anew_each_time(tmp_path):
    path = tmp_path / "mesh.key"
    first, second = MeshKeys.make(path), MeshKeys.make(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert first != second == MeshKeys.load(str(path)) and MeshKeys.load("") == MeshKeys()


def test_a_key_file_holds_two_keys_newest_first(tmp_path):
    path = tmp_path / "mesh.key"
    path.touch(0o600)
    path.write_text(f"{'02' * 32}\n{'01' * 32}\n")
    assert MeshKeys.load(str(path)) == MeshKeys((*NEW.keys, *OLD.keys))


@pytest.mark.parametrize("text", ["", "00" * 8, "not hexadecimal", "\n".join(["01" * 32] * 3)])
def test_a_key_file_that_is_none_is_refused_with_its_name(tmp_path, text):
    path = tmp_path / "mesh.key"
    path.touch(0o600)
    path.write_text(text)
    for name in (path, tmp_path / "missing"):
        with pytest.raises(ConfigError) as caught:
            MeshKeys.load(str(name))
        assert caught.value.field == "mesh.key_file" and name.name in caught.value.message


def test_a_key_file_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "mesh.key"
    MeshKeys.make(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError):
        MeshKeys.load(str(path))
