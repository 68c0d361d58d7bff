"""The generated code equals the protocol, and runs with every protobuf that vLLM allows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from kvtier.v1 import kvtier_pb2, kvtier_pb2_grpc
from tests.tidy.sources import ROOT

PROTO_NAME = "kvtier/v1/kvtier.proto"

# vLLM 0.28 to 0.33 all say: protobuf >= 5.29.6, not 6.30 to 6.33.4, without an upper bound. grpcio
# they do not pin; the oldest one here is the lower bound of pyproject.toml.
RUNTIMES = [
    pytest.param("5.29.6", "1.66.2", id="oldest"),
    pytest.param("6.33.5", "1.76.0", id="between"),
    pytest.param("7.36.2", "1.85.3", id="newest"),
]

# Runs with the old or new libraries first on the path: every message is made, written and read
# back, and one call goes over a Unix socket.
PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
import google.protobuf
import grpc
from google.protobuf import message_factory
from kvtier.v1 import kvtier_pb2 as pb
from kvtier.v1 import kvtier_pb2_grpc as pb_grpc

assert google.protobuf.__version__ == sys.argv[1], google.protobuf.__version__
assert grpc.__version__ == sys.argv[2], grpc.__version__
for name in pb.DESCRIPTOR.message_types_by_name:
    message = getattr(pb, name)()
    assert getattr(pb, name).FromString(message.SerializeToString()) == message, name
spec = pb.NamespaceSpec(model="m", block_tokens=16, extra={"a": "b"})
frame = pb.ClientFrame(open_namespace=pb.OpenNamespace(spec=spec, about=7))
assert pb.ClientFrame.FromString(frame.SerializeToString()).open_namespace.spec.extra["a"] == "b"
slots = pb.AbortRequest(slots=range(1000))
assert list(pb.AbortRequest.FromString(slots.SerializeToString()).slots) == list(range(1000))


class Servicer(pb_grpc.KVTierServicer):
    def Match(self, request, context):
        return pb.MatchResponse(matched_count=len(request.hashes) // 16)


server = grpc.server(ThreadPoolExecutor(1))
pb_grpc.add_KVTierServicer_to_server(Servicer(), server)
assert server.add_insecure_port("unix:" + sys.argv[3])
server.start()
with grpc.insecure_channel("unix:" + sys.argv[3]) as channel:
    answer = pb_grpc.KVTierStub(channel).Match(pb.MatchRequest(hashes=bytes(48)), timeout=20)
server.stop(None).wait()
assert answer.matched_count == 3, answer
print("ok")
"""


def described_by_protocol(folder: Path) -> descriptor_pb2.FileDescriptorProto:
    """What the installed compiler makes of the protocol."""
    output = folder / "set.bin"
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto")),
            *(f"--descriptor_set_out={output}", str(ROOT / "proto" / PROTO_NAME)),
        ],
        check=True,
        timeout=60,
    )
    files = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())
    return next(file for file in files.file if file.name == PROTO_NAME)


def described_by_code() -> descriptor_pb2.FileDescriptorProto:
    described = descriptor_pb2.FileDescriptorProto()
    described.ParseFromString(kvtier_pb2.DESCRIPTOR.serialized_pb)
    return described


def clear_json_names(messages: object) -> None:
    """Compilers differ in whether they write these; they follow from the names."""
    for message in messages:  # type: ignore[attr-defined]
        for field in message.field:
            field.ClearField("json_name")
        clear_json_names(message.nested_type)


def test_generated_code_equals_the_protocol(tmp_path: Path) -> None:
    wanted, found = described_by_protocol(tmp_path), described_by_code()
    clear_json_names(wanted.message_type)
    clear_json_names(found.message_type)
    assert found == wanted, "the protocol has changed: run `make proto`"


def test_service_code_has_every_call_of_the_protocol(tmp_path: Path) -> None:
    [service] = described_by_protocol(tmp_path).service
    calls = {method.name for method in service.method}
    written = {name for name in vars(kvtier_pb2_grpc.KVTierServicer) if not name.startswith("_")}
    assert written == calls
    text = Path(kvtier_pb2_grpc.__file__).read_text(encoding="utf-8")
    for method in service.method:
        kind = "stream" if method.client_streaming else "unary"
        kind += "_stream" if method.server_streaming else "_unary"
        for type_name in (method.input_type, method.output_type):
            assert f"kvtier__pb2.{type_name.rpartition('.')[2]}." in text
        assert f"self.{method.name} = channel.{kind}(" in text


def test_type_stubs_name_every_message() -> None:
    stubs = (ROOT / "kvtier" / "v1" / "kvtier_pb2.pyi").read_text(encoding="utf-8")
    for name, message in kvtier_pb2.DESCRIPTOR.message_types_by_name.items():
        assert f"class {name}(" in stubs
        for field in message.fields:
            assert f"{field.name.upper()}_FIELD_NUMBER" in stubs


def runtime_folder(protobuf: str, grpcio: str) -> Path:
    """A folder with these versions alone, kept inside the environment for the next time."""
    folder = Path(sys.prefix) / "kvtier-runtimes" / f"protobuf-{protobuf}-grpcio-{grpcio}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
                *("--disable-pip-version-check", "--only-binary", ":all:"),
                *("--target", str(partial), f"protobuf=={protobuf}", f"grpcio=={grpcio}"),
            ],
            check=True,
            timeout=100,
        )
        partial.rename(
            folder
        )  # In one step: an interrupted install is never taken for a whole one.
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="grpcio 1.66 has no wheels for it")
@pytest.mark.parametrize(("protobuf", "grpcio"), RUNTIMES)
def test_generated_code_runs_with_the_runtimes_of_vllm(
    protobuf: str, grpcio: str, socket_dir: Path
) -> None:
    path = os.pathsep.join([str(runtime_folder(protobuf, grpcio)), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, protobuf, grpcio, str(socket_dir / "s")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ok"
