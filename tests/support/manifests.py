"""The files of deploy/kubernetes as a cluster would see them: rendered by kubectl.

A kubectl of before 2022, as Debian's is, holds an old kustomize. For that one a copy of the
kustomizations is put into its words: directories are `bases`, patches are `patchesStrategicMerge`,
a component is an overlay. What is patched, and with what, stays as it is written.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.tidy.sources import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
Document = dict[str, Any]


def documents_in(path: Path) -> list[Document]:
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]


def render(name: str, folder: Path) -> list[Document]:
    """Every object of deploy/kubernetes/NAME, a component with the base; `folder`: for a copy."""
    copy = folder / "kubernetes"
    shutil.copytree(KUBERNETES, copy)
    [given] = documents_in(copy / name / "kustomization.yaml")
    if not _is_new():
        for path in copy.glob("*/kustomization.yaml"):
            path.write_text(yaml.safe_dump(_in_old_words(path)))
    elif given["kind"] == "Component":
        overlay = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": ["../base"],
            "components": [f"../{name}"],
        }
        name = "overlay"
        (copy / name).mkdir()
        (copy / name / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    done = subprocess.run(
        ["kubectl", "kustomize", str(copy / name)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def _is_new() -> bool:
    told = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True)
    return "Kustomize Version" in told.stdout


def _in_old_words(path: Path) -> Document:
    [given] = documents_in(path)
    resources = given.pop("resources", [])
    is_component = given["kind"] == "Component"
    bases = [one for one in resources if (path.parent / one).is_dir()]
    return {
        **{name: value for name, value in given.items() if name != "patches"},
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "bases": [*bases, *(["../base"] if is_component else [])],
        "resources": [one for one in resources if one not in bases],
        "patchesStrategicMerge": [patch["path"] for patch in given.get("patches", [])],
    }
