"""The protos keep the rules of their style, and the generated code is theirs."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

protoc = pytest.importorskip("grpc_tools.protoc", reason="needs grpcio-tools, which `make test` installs")

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "protos/headrace/v1").glob("*.proto"))
Field = descriptor_pb2.FieldDescriptorProto
LINKS = {"OpenDecodeLink", "OpenTokenLink", "OpenWriterLink", "OpenPrefillLink", "OpenCatalogueLink"}
SERVER_STREAMS = {"Generate", "Watch"} | LINKS
CLIENT_STREAMS = {"WriteRows"} | LINKS
NO_SERVICE = {"common", "link"}


def compile_protos(*options: str) -> None:
    """Runs the compiler on every proto."""
    well_known = str(resources.files("grpc_tools") / "_proto")
    names = [str(path.relative_to(ROOT / "protos")) for path in PROTOS]
    status = protoc.main(["protoc", f"-I{ROOT / 'protos'}", f"-I{well_known}", *options, *names])
    assert status == 0


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[descriptor_pb2.FileDescriptorProto]:
    """Every proto with its comments."""
    target = tmp_path_factory.mktemp("descriptors") / "set"
    compile_protos(f"--descriptor_set_out={target}", "--include_source_info")
    return list(descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file)


def test_the_generated_code_is_what_the_compiler_makes_today(tmp_path):
    compile_protos(f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", f"--pyi_out={tmp_path}")
    made = {path.name: path.read_text() for path in (tmp_path / "headrace/v1").iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "headrace/v1").iterdir() if path.stem.rpartition("_pb2")[1]}
    assert made.keys() == kept.keys(), "run `make protos`"
    assert [name for name in made if made[name] != kept[name]] == [], "run `make protos`"


def messages(file):
    """(path, message) for all messages, inner ones too; `path` is the index path in the descriptor."""
    todo = [((4, index), message) for index, message in enumerate(file.message_type)]
    while todo:
        path, message = todo.pop()
        yield path, message
        todo += [((*path, 3, index), inner) for index, inner in enumerate(message.nested_type)]


def enums(file):
    """(path, enum) for all enums."""
    yield from (((5, index), enum) for index, enum in enumerate(file.enum_type))
    for path, message in messages(file):
        yield from (((*path, 4, index), enum) for index, enum in enumerate(message.enum_type))


def named_things(file):
    """(path, name) of everything that must have a comment."""
    for path, message in messages(file):
        yield path, message.name
        yield from (((*path, 2, i), f"{message.name}.{field.name}") for i, field in enumerate(message.field))
    for path, enum in enums(file):
        yield path, enum.name
        yield from (((*path, 2, i), f"{enum.name}.{value.name}") for i, value in enumerate(enum.value))
    for index, service in enumerate(file.service):
        yield (6, index), service.name
        yield from (((6, index, 2, i), f"{service.name}.{method.name}") for i, method in enumerate(service.method))


def test_everything_has_a_comment_above_it(files):
    missing = []
    for file in files:
        commented = {tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()}
        missing += [f"{file.name}: {name}" for path, name in named_things(file) if path not in commented]
    assert missing == []


def test_every_file_opens_with_what_it_is_for():
    for path in PROTOS:
        assert path.read_text().startswith("// "), path.name


def test_one_package_and_one_file_a_service(files):
    assert {file.package for file in files} == {"headrace.v1"}
    for file in files:
        stem = Path(file.name).stem
        wanted = [] if stem in NO_SERVICE else [f"{stem}service"]
        assert [service.name.lower() for service in file.service] == wanted, file.name


def test_every_rpc_has_its_own_request_and_response(files):
    used = []
    for method in (method for file in files for service in file.service for method in service.method):
        assert method.input_type == f".headrace.v1.{method.name}Request"
        assert method.output_type == f".headrace.v1.{method.name}Response"
        used += [method.input_type, method.output_type]
    assert len(used) == len(set(used))


def test_only_the_named_rpcs_stream(files):
    methods = [method for file in files for service in file.service for method in service.method]
    assert {method.name for method in methods if method.server_streaming} == SERVER_STREAMS
    assert {method.name for method in methods if method.client_streaming} == CLIENT_STREAMS


def test_every_message_of_a_link_is_a_header_and_items(files):
    of_links = [
        message
        for file in files
        for _, message in messages(file)
        if message.name.removesuffix("Request").removesuffix("Response") in LINKS
    ]
    assert len(of_links) == 2 * len(LINKS)
    for message in of_links:
        fields = [(field.name, field.number) for field in message.field]
        assert fields in ([("header", 1)], [("header", 1), ("items", 2)]), message.name


def test_names_have_their_usual_form(files):
    for file in files:
        for _, message in messages(file):
            assert re.fullmatch(r"[A-Z][A-Za-z0-9]*", message.name), message.name
            assert not message.name.endswith("Status"), message.name
            for field in message.field:
                where = f"{message.name}.{field.name}"
                assert re.fullmatch(r"[a-z]+(_[a-z0-9]+)*", field.name), where
                assert not field.name.startswith("num_"), f"{where}: counts are called _count"
                assert not re.search(r"_(s|ms|secs|seconds|millis)$", field.name), f"{where}: use Duration"


def test_enum_values_carry_the_name_and_begin_at_unspecified(files):
    for _, enum in (pair for file in files for pair in enums(file)):
        prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
        assert (enum.value[0].name, enum.value[0].number) == (f"{prefix}UNSPECIFIED", 0)
        assert all(value.name.startswith(prefix) for value in enum.value), enum.name


def test_no_unsigned_integers(files):
    unsigned = {Field.TYPE_UINT32, Field.TYPE_UINT64, Field.TYPE_FIXED32, Field.TYPE_FIXED64}
    found = [
        f"{message.name}.{field.name}"
        for file in files
        for _, message in messages(file)
        for field in message.field
        if field.type in unsigned
    ]
    assert found == []
