"""Image, compose file and Kubernetes objects: real linters, and that they agree with kvtier.

Neither Docker nor a cluster is needed: what is checked is what can be read.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from kvtier.cli.main import COMMANDS
from kvtier.config import Config, load
from kvtier.config_values import split_address
from kvtier.paths import SOCKET_VARIABLE
from tests.support.manifests import KUBERNETES, Document, documents_in, render
from tests.tidy.sources import ROOT

DEPLOY = ROOT / "deploy"
DOCKER = DEPLOY / "docker"
COMPOSE = documents_in(DOCKER / "compose.yaml")[0]
CONFIGS = (
    DOCKER / "kvtier.toml",
    KUBERNETES / "base" / "kvtier.toml",
    KUBERNETES / "example" / "kvtier.toml",
    DEPLOY / "systemd" / "kvtier.toml",
)
OURS = "10464"  # User and group of the image.
MIB = 1 << 20
PROCESS_BYTES = 200 * MIB  # Beside the slabs, as docs/operations.md has it.
YAMLLINT = "{extends: default, rules: {line-length: {max: 110}, document-start: disable}}"
UNITS = {"m": MIB, "Mi": MIB, "Gi": 1 << 30}


def tool(name: str) -> str:
    """One of the linters that `make setup` installs."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*words: str | Path) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Document]]:
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl (Debian: kubernetes-client)")
    names = ("base", "example", "monitoring")
    return {name: render(name, tmp_path_factory.mktemp(name)) for name in names}


def size_of(text: str) -> int:
    found = re.fullmatch(r"(\d+)(\w+)", text)
    assert found, text
    return int(found[1]) * UNITS[found[2]]


# --------------------------------------------------------------------------------------- linters


@pytest.mark.parametrize("name", ["Dockerfile", "engine.Dockerfile"])
def test_hadolint_finds_nothing(name: str) -> None:
    run(tool("hadolint"), DOCKER / name)


def test_yamllint_finds_nothing() -> None:
    """Rules have promtool."""
    paths = [path for folder in (DOCKER, KUBERNETES) for path in folder.rglob("*.y*ml")]
    assert len(paths) > 10
    run(tool("yamllint"), "--strict", "-d", YAMLLINT, *paths)


def test_the_compose_file_is_what_the_specification_allows() -> None:
    run(
        tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", DOCKER / "compose.yaml"
    )


def test_objects_are_what_kubernetes_allows(
    rendered: dict[str, list[Document]], tmp_path: Path
) -> None:
    for name, documents in rendered.items():
        (tmp_path / name).write_text(yaml.safe_dump_all(documents))
    run(tool("kubernetes-validate"), "--strict", "--no-warn", *tmp_path.iterdir())


# --------------------------------------------------------------------------- agreeing with kvtier


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_option_exists(path: Path) -> None:
    load(path, {})


def command_lines() -> Iterator[list[str]]:
    """What the entrypoint of our image is given, wherever it is started."""
    text = (DOCKER / "Dockerfile").read_text()
    yield json.loads(text.split("\nCMD ")[-1])
    for service in COMPOSE["services"].values():
        if service["image"].startswith("kvtier:") and "command" in service:
            yield service["command"]
    for path in KUBERNETES.rglob("*.yaml"):
        for document in documents_in(path):
            for container in containers_of(document):
                if container["image"].startswith("kvtier:") and "args" in container:
                    yield container["args"]


def containers_of(document: Document) -> list[Document]:
    """With an image: a patch may leave it out."""
    spec = document.get("spec", {})
    spec = spec.get("template", {}).get("spec", spec)
    found = [*spec.get("initContainers", []), *spec.get("containers", [])]
    return [one for one in found if "image" in one]


def test_every_command_line_is_one_of_kvtier() -> None:
    lines = list(command_lines())
    assert len(lines) >= 2
    for words in lines:
        assert words[0] in COMMANDS
        parser = argparse.ArgumentParser()
        importlib.import_module(COMMANDS[words[0]].module).add_arguments(parser)
        parser.parse_args(words[1:])  # Exits when there is no such option.


def test_units_and_images_start_the_same_file() -> None:
    unit = (DEPLOY / "systemd" / "kvtier.service").read_text()
    for words in command_lines():
        if words[0] != "serve":
            continue
        assert f"ExecStart=/opt/kvtier/bin/kvtier {' '.join(words)}\n" in unit


def test_ports_sockets_and_state_are_the_same_everywhere() -> None:
    configs = [load(path, {}) for path in CONFIGS]
    [socket] = {one.server.socket for one in configs}
    [address] = {one.admin.address for one in configs}
    assert {one.server.state_dir for one in configs} == {"", "/var/lib/kvtier"}  # systemd's own.
    assert load(None, {}).admin.address == address
    port = split_address("admin.address", address)[1]

    files = [*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml"), *DEPLOY.rglob("*Dockerfile")]
    text = "\n".join(path.read_text() for path in files)
    assert {int(found) for found in re.findall(r"127\.0\.0\.1:(94\d\d)", text)} == {port}
    for found in re.findall(rf"{SOCKET_VARIABLE}(?:=|, value: )(\S+?)[}}\s\\]", text):
        assert found == socket
    mounted = [volume.split(":") for volume in COMPOSE["services"]["kvtier"]["volumes"]]
    assert {"/run/kvtier", "/var/lib/kvtier"} <= {words[1] for words in mounted}


def test_every_variable_of_ours_is_one_that_the_code_reads() -> None:
    known = "\n".join(path.read_text() for path in (ROOT / "kvtier").rglob("*.py"))
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.suffix not in (".md", ".json"):
            for name in re.findall(r"\bKVTIER_[A-Z_]+\b", path.read_text()):
                assert f'"{name}"' in known, f"{path.name}: {name}"


def test_engines_are_told_of_a_connector_that_exists() -> None:
    pods = documents_in(KUBERNETES / "example" / "engine.yaml")
    composed = COMPOSE["services"]["engine"]["command"]
    for words in (composed, pods[0]["spec"]["containers"][0]["args"]):
        told = json.loads(words[words.index("--kv-transfer-config") + 1])
        module = ROOT.joinpath(*told["kv_connector_module_path"].split("."), "__init__.py")
        assert told["kv_connector"] in module.read_text()
        assert told["kv_load_failure_policy"] == "recompute"


def test_a_holder_listens_where_the_daemon_looks_for_it_and_is_never_replaced_with_it() -> None:
    holder, daemon = (COMPOSE["services"][name] for name in ("holder", "kvtier"))
    looked_for = load(DOCKER / "kvtier.toml", {}).restart.holder
    assert holder["command"] == ["hold", looked_for]
    assert looked_for in holder["healthcheck"]["test"][-1]
    assert set(holder["volumes"]) <= set(daemon["volumes"])
    [kept] = documents_in(KUBERNETES / "base" / "holder.yaml")
    [container] = kept["spec"]["template"]["spec"]["containers"]
    assert container["args"] == [
        "hold",
        load(KUBERNETES / "base" / "kvtier.toml", {}).restart.holder,
    ]
    assert kept["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_memory_is_what_the_budget_needs(rendered: dict[str, list[Document]]) -> None:
    config = load(DOCKER / "kvtier.toml", {})
    assert size_of(COMPOSE["services"]["kvtier"]["mem_limit"]) == config.dram.bytes + PROCESS_BYTES
    for name, documents in rendered.items():
        [text] = [one["data"]["kvtier.toml"] for one in documents if one["kind"] == "ConfigMap"]
        limits = daemon_of(documents)["resources"]["limits"]
        budget = config_of(text).dram.bytes
        if "hugepages-2Mi" in limits:
            assert size_of(limits["hugepages-2Mi"]) == budget, name
        else:
            assert size_of(limits["memory"]) == budget + PROCESS_BYTES, name


def config_of(text: str) -> Config:
    options = {
        f"{section}.{key}": value
        for section, table in tomllib.loads(text).items()
        for key, value in table.items()
    }
    return load(None, options)


def pod_of(documents: list[Document]) -> Any:
    [pod] = [
        one["spec"]["template"]["spec"]
        for one in documents
        if one["kind"] == "DaemonSet" and one["metadata"]["name"] == "kvtier"
    ]
    return pod


def daemon_of(documents: list[Document]) -> Any:
    [daemon] = [one for one in pod_of(documents)["containers"] if one["name"] == "kvtier"]
    return daemon


def test_values_reach_the_daemon_s_pod(rendered: dict[str, list[Document]]) -> None:
    pod = pod_of(rendered["example"])
    assert pod["securityContext"]["supplementalGroups"] == [6]
    assert pod["securityContext"]["runAsUser"] == int(OURS), "a patch adds, and replaces nothing"
    assert pod["nodeSelector"]
    watched = pod_of(rendered["monitoring"])
    assert {one["name"] for one in watched["containers"]} == {"metrics", "kvtier"}


def test_nobody_cuts_a_drain_short() -> None:
    seconds = load(DOCKER / "kvtier.toml", {}).server.drain_seconds + 10
    assert int(COMPOSE["services"]["kvtier"]["stop_grace_period"].removesuffix("s")) >= seconds
    [daemons] = documents_in(KUBERNETES / "base" / "daemonset.yaml")
    assert daemons["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= seconds


def test_one_user_and_group_everywhere() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    assert f"--gid {OURS} kvtier" in text
    assert f"\nUSER {OURS}:{OURS}\n" in text
    assert COMPOSE["services"]["engine"]["group_add"] == [OURS]
    [daemons] = documents_in(KUBERNETES / "base" / "daemonset.yaml")
    pod = daemons["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["runAsGroup"] == int(OURS)
    assert pod["initContainers"][0]["command"][1] == f"{OURS}:{OURS}"
    [engine] = documents_in(KUBERNETES / "example" / "engine.yaml")
    assert engine["spec"]["securityContext"]["supplementalGroups"] == [int(OURS)]


# ------------------------------------------------------------------------------------ what is named


def test_what_is_mounted_or_built_from_exists() -> None:
    for name, service in COMPOSE["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists(), f"{name}: {source}"
            else:
                assert source in COMPOSE["volumes"], f"{name}: {source}"
        if "build" in service:
            assert (DOCKER / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).is_file()
    for path in KUBERNETES.rglob("kustomization.yaml"):
        [given] = documents_in(path)
        patched = [patch["path"] for patch in given.get("patches", [])]
        for named in [*given["resources"], *patched]:
            assert (path.parent / named).exists(), f"{path.parent.name}: {named}"


def test_what_the_image_is_built_from_is_let_in() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    copied = [
        word
        for name in ("Dockerfile", "engine.Dockerfile")
        for line in re.findall(r"^COPY (?!--from)(.+)$", (DOCKER / name).read_text(), re.MULTILINE)
        for word in line.split()[:-1]
    ]
    assert set(copied) == let_in
    assert all((ROOT / name).exists() for name in let_in)


def test_every_image_is_pinned() -> None:
    text = "\n".join(
        path.read_text()
        for path in [*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*Dockerfile")]
        if path.name != "kustomization.yaml"
    )
    images = re.findall(r"(?:^FROM|\bimage:) (\S+)", text, re.MULTILINE)
    assert len(images) > 8
    assert not [one for one in images if not re.search(r":v?\d+(\.\d+){2}\S*$", one)]


def test_what_pip_installs_is_pinned_by_hash_to_versions_that_pyproject_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"]]
    for extra in ("remote", "events", "encryption"):
        wanted += [Requirement(text) for text in project["optional-dependencies"][extra]]
    pinned: dict[str, list[str]] = {}
    for entry in re.split(r"\n(?=\S)", (DEPLOY / "requirements.lock").read_text()):
        name, version = re.match(r"([\w.-]+)==([\w.]+)", entry).groups()  # type: ignore[union-attr]
        assert re.findall(r"--hash=sha256:[0-9a-f]{64}", entry), f"{name} without a hash"
        pinned.setdefault(name, []).append(version)
    assert set(pinned) >= {one.name for one in wanted}, "make lock"
    for one in wanted:
        assert all(map(one.specifier.contains, pinned[one.name])), f"{one}: make lock"
