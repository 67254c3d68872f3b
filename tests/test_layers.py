"""The house's doors: who may import what, read from the source of every file."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("services", "headrace", "kernels")
VENDORS_OF_KERNELS = {"torch", "numpy", "triton", "flashinfer", "flash_mla", "deep_ep"}

# One door each: the only files that may import these.
DOORS = {
    "grpc": ("headrace/rpc.py", "headrace/client.py", "services/*/server.py"),
    "grpc_health": ("headrace/rpc.py",),
    "grpc_reflection": ("headrace/rpc.py",),
    "flashinfer": ("kernels/*.py",),
    "flash_mla": ("kernels/*.py",),
    "deep_ep": ("kernels/*.py",),
    "triton": ("kernels/*.py",),
    "mooncake": ("headrace/transfer/mooncake.py", "headrace/transfer/store.py"),
    "redis": ("headrace/process/registry.py", "services/kvstore/redis_index.py"),
    "opentelemetry": ("headrace/observe/telemetry.py",),
    "headrace.v1": ("headrace/rpc.py", "headrace/client.py", "headrace/wire.py", "services/*/server.py"),
}
# Rust: in no file of the control plane, which imports what it needs from these alone.
RUST = {"tokenizers", "tiktoken", "safetensors", "pydantic", "orjson", "rpds", "cryptography", "polars", "jiter"}
NO_TORCH = ("headrace/cli/*.py", "services/router/*.py", "services/kvstore/*.py")
"""These neither name torch nor, in a fresh interpreter, load it."""
REPORTS_ON_TORCH = "headrace/cli/doctor.py"
"""The named exception: it says which torch this host has, and imports it only for that."""
COMPOSITION_ROOTS = {"services/aggregated/__main__.py": {"decode", "prefill"}}
"""The named exceptions to "a service never imports another": file -> the services it may import."""


@functools.cache
def sources() -> list[Path]:
    """Our files by path from the root, without the generated ones."""
    found = (path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in found if not path.is_relative_to("headrace/v1"))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Full names a file imports, also inside functions; `from headrace import rpc` counts as headrace.rpc."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what is imported"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def takes(path: Path, package: str) -> bool:
    """Whether the file imports the package or something in it."""
    return any(name == package or name.startswith(package + ".") for name in imports(path))


def at(path: Path, patterns) -> bool:
    """Whether the path fits one of the patterns."""
    return any(path.match(pattern) for pattern in patterns)


@pytest.mark.parametrize("package", DOORS)
def test_a_library_is_imported_at_its_door_only(package):
    assert [str(path) for path in sources() if takes(path, package) and not at(path, DOORS[package])] == []


def test_every_door_is_there():
    for package, patterns in DOORS.items():
        if package != "deep_ep":  # nothing of ours spans hosts yet; the door says where it will be
            assert any(at(path, patterns) and takes(path, package) for path in sources()), package


def test_the_environment_is_read_in_config_only():
    readers = [path for path in sources() if {"os.environ", "os.getenv"} & uses_of_os(path)]
    assert [str(path) for path in readers] == ["headrace/config.py"]


def uses_of_os(path: Path) -> set[str]:
    """`os.x` for every attribute of os that a file mentions or imports."""
    tree = ast.parse((ROOT / path).read_text())
    mentioned = {
        f"os.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
    }
    return mentioned | {name for name in imports(path) if name.startswith("os.")}


def test_nothing_imports_what_stands_to_its_left():
    wrong = []
    for path in sources():
        left = PACKAGES[: PACKAGES.index(path.parts[0])]
        wrong += [f"{path} imports {package}" for package in left if takes(path, package)]
    assert wrong == []


def test_services_reach_kernels_only_through_headrace():
    assert [str(path) for path in sources() if path.parts[0] == "services" and takes(path, "kernels")] == []


def test_a_service_never_imports_another():
    wrong = []
    for path in (path for path in sources() if path.parts[0] == "services" and len(path.parts) > 2):
        others = {name.split(".")[1] for name in imports(path) if name.startswith("services.")} - {path.parts[1]}
        others -= COMPOSITION_ROOTS.get(path.as_posix(), set())
        wrong += [f"{path} imports services.{other}" for other in others]
    assert wrong == []


def test_kernels_import_tensors_and_nothing_of_ours():
    for path in (path for path in sources() if path.parts[0] == "kernels"):
        tops = {name.split(".")[0] for name in imports(path)}
        assert tops - set(sys.stdlib_module_names) <= VENDORS_OF_KERNELS | {"kernels"}, path


@pytest.mark.parametrize("package", ["torch", *sorted(RUST)])
def test_the_control_plane_names_neither_torch_nor_rust(package):
    exempt = {REPORTS_ON_TORCH} if package == "torch" else set()
    found = {path.as_posix() for path in sources() if at(path, NO_TORCH) and takes(path, package)}
    assert found - exempt == set()


CONTROL_PLANE = ("services.kvstore.__main__", "services.router.__main__", "headrace.cli.main", "headrace.launch.local")


@pytest.mark.parametrize("module", CONTROL_PLANE)
def test_importing_a_control_plane_module_loads_neither_torch_nor_mooncake_nor_rust(module):
    heavy = ["torch", "mooncake", "pytorch_tokenizers", "transformers", *sorted(RUST)]
    program = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


@pytest.mark.parametrize("path", ["headrace/cache/blocks.py", "services/prefill/core.py", "services/decode/core.py"])
def test_cores_run_without_torch_or_network(path):
    module = path.removesuffix(".py").replace("/", ".")
    program = f"import sys, {module}; print([name for name in ('torch', 'grpc', 'redis') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


def test_the_kernels_distribution_of_hugging_face_is_not_beside_ours():
    """It brings an import package called `kernels`; with ours in front, transformers fails to import."""
    import importlib.metadata

    owners = importlib.metadata.packages_distributions().get("kernels", [])
    assert "kernels" not in owners, "remove the distribution `kernels` from this environment: it hides our own"


def test_no_folder_below_tests_hides_a_package():
    hiding = {path.name for path in (ROOT / "tests").rglob("*") if path.is_dir()} & set(PACKAGES)
    assert hiding == set() and list((ROOT / "tests").rglob("__init__.py")) == []
