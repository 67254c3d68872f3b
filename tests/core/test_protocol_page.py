"""`docs/protocol.md` keeps step: its examples are messages of the calls they name, and it explains every reason there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool, json_format, message_factory

from headrace.v1 import decode_pb2, inference_pb2, kvstore_pb2, prefill_pb2, router_pb2
from headrace.wire.link import CODES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/protocol.md").read_text()
SERVICE_FILES = (decode_pb2, inference_pb2, kvstore_pb2, prefill_pb2, router_pb2)
EXAMPLES = re.findall(r"^```grpcurl \S+ (\S+)/(\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
REASON = re.compile(r'\breason\s*=\s*"([A-Z][A-Z_]+)"')


def test_there_is_an_example_for_every_service():
    services = {name for file in SERVICE_FILES for name in file.DESCRIPTOR.services_by_name}
    assert {service.removeprefix("headrace.v1.") for service, _, _ in EXAMPLES} == services


@pytest.mark.parametrize(("service", "method", "text"), EXAMPLES, ids=[f"{x[1]}-{i}" for i, x in enumerate(EXAMPLES)])
def test_every_example_is_a_message_of_its_call(service, method, text):
    call = descriptor_pool.Default().FindServiceByName(service).FindMethodByName(method)
    message = json_format.Parse(text, message_factory.GetMessageClass(call.input_type)())
    assert message.ByteSize() or text.strip() == "{}"


def reasons_in_code() -> dict[str, str]:
    """Every reason that a process may send, and a file that does."""
    found = {}
    for folder in ("headrace", "services"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not {"v1", "cli"} & set(path.relative_to(ROOT / folder).parts):
                found |= {reason: path.name for reason in REASON.findall(path.read_text())}
    return found


def test_every_reason_is_explained_and_none_that_is_gone():
    explained = set(re.findall(r"`([A-Z][A-Z_]+)`", PAGE.partition("## 5. Reasons")[2]))
    known = reasons_in_code()
    assert {reason: where for reason, where in known.items() if reason not in explained} == {}
    assert explained - known.keys() - {kind.reason for kind in CODES} - {"CANCELLED_BY_DECODE", "FENCING"} == set()


def test_every_call_of_the_protos_stands_on_the_page():
    methods = {m.name for file in SERVICE_FILES for s in file.DESCRIPTOR.services_by_name.values() for m in s.methods}
    missing = {name for name in methods if name not in PAGE and not re.fullmatch(r"Get\w+(Info|Ledger)", name)}
    assert missing == set()


def test_every_metadata_key_stands_on_the_page():
    keys = set()
    for path in [*(ROOT / "headrace/rpc").rglob("*.py"), *(ROOT / "services").rglob("*.py")]:
        keys |= set(re.findall(r'"(headrace-[a-z-]+|grpc-[a-z-]+-bin|traceparent)"', path.read_text()))
    assert {"headrace-reason", "headrace-request-id", "traceparent"} <= keys
    assert {key for key in keys if f"`{key}`" not in PAGE} == set()
