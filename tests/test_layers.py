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
EVERYTHING = (*PACKAGES, "bench", "training")
ORDER = (
    *("kernels.select", "kernels.toolchain", "kernels.formats", "kernels.rows", "kernels.linear", "kernels.experts"),
    *(
        "kernels.attention",
        "headrace.errors",
        "headrace.clock",
        "headrace.config",
        "headrace.protocol",
        "headrace.observe",
    ),
    *("headrace.wire", "headrace.text", "headrace.cache", "headrace.parallel", "headrace.transfer", "headrace.model"),
    *(
        "headrace.engine",
        "headrace.planning",
        "headrace.rpc",
        "headrace.client",
        "headrace.launch",
        "headrace.process",
        "headrace.evals",
    ),
    *("services.kvstore", "services.router", "services.prefill", "services.decode", "services.aggregated"),
    *("training", "bench", "headrace.cli"),
)
"""Every room of the house, the lowest first. A room imports itself and what stands before it: no arrow goes up, so there is no
circle of rooms either."""
VENDORS_OF_KERNELS = {"torch", "numpy", "triton", "flashinfer", "flash_mla", "deep_ep"}

# One door each: the only files that may import these.
DOORS = {
    "grpc": ("headrace/rpc/*.py", "headrace/client.py", "services/*/server.py"),
    "grpc_health": ("headrace/rpc/*.py",),
    "grpc_reflection": ("headrace/rpc/server.py",),
    "google.rpc": ("headrace/rpc/status.py",),
    "flashinfer": ("kernels/*/*.py",),
    "flash_mla": ("kernels/*/*.py",),
    "deep_ep": ("kernels/*/*.py",),
    "triton": ("kernels/*/*.py",),
    "mooncake": ("headrace/transfer/mooncake.py", "headrace/transfer/store.py"),
    "redis": ("headrace/process/registry.py", "services/kvstore/redis_index.py"),
    "opentelemetry": ("headrace/observe/telemetry.py", "headrace/observe/ring.py"),
    "headrace.v1": ("headrace/rpc/*.py", "headrace/client.py", "headrace/wire/*.py", "services/*/server.py"),
}
# Rust: in no file of the control plane, which imports what it needs from these alone.
RUST = {"tokenizers", "tiktoken", "safetensors", "pydantic", "orjson", "rpds", "cryptography", "polars", "jiter"}
NO_TORCH = ("headrace/cli/*.py", "services/router/*.py", "services/kvstore/*.py")
"""These neither name torch nor, in a fresh interpreter, load it."""
REPORTS_ON_TORCH = "headrace/cli/doctor.py"
"""The named exception: it says which torch this host has, and imports it only for that."""
COMPOSITION_ROOTS = {"services/aggregated/__main__.py": ("services.decode", "services.prefill")}
"""The named exceptions to "a service never imports another": file -> what it may import."""


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


@functools.cache
def house() -> dict[str, frozenset[str]]:
    """Module -> the modules of ours that it imports when it runs (not those for type checkers alone)."""
    files = {path for package in EVERYTHING for path in (ROOT / package).rglob("*.py")}
    names = {module_of(path.relative_to(ROOT)): path for path in files if "v1" not in path.parts}
    made = {}
    for name, path in names.items():
        asked = imported_when_run(ast.parse(path.read_text()))
        made[name] = frozenset(x if x in names else x.rpartition(".")[0] for x in asked) & names.keys() - {name}
    return made


def module_of(path: Path) -> str:
    """`a/b.py` -> `a.b`, `a/__init__.py` -> `a`."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imported_when_run(tree: ast.Module) -> set[str]:
    """Every name that is imported, in functions too; `from a import b` counts as a.b."""
    hints = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    unseen = {id(inner) for node in hints for inner in ast.walk(node)}
    names: set[str] = set()
    for node in (node for node in ast.walk(tree) if id(node) not in unseen):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(module: str) -> str:
    """The room a module is in: `training` and `bench` are one each."""
    top = module.partition(".")[0]
    return top if top in ("training", "bench") else ".".join(module.split(".")[:2])


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
    assert [str(path) for path in readers] == ["headrace/config/environment.py"]


def uses_of_os(path: Path) -> set[str]:
    """`os.x` for every attribute of os that a file mentions or imports."""
    tree = ast.parse((ROOT / path).read_text())
    mentioned = {
        f"os.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
    }
    return mentioned | {name for name in imports(path) if name.startswith("os.")}


def test_log_lines_carry_their_fields_as_fields():
    """`extra={"x": 1}` of the standard library reaches no formatter of ours: only `extra={"fields": ...}` does."""
    lost = []
    for path in sources():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.keyword) and node.arg == "extra":
                keys = [getattr(key, "value", None) for key in getattr(node.value, "keys", [])]
                lost += [f"{path}:{node.value.lineno}"] if keys != ["fields"] else []
    assert lost == []


def test_races_are_run_by_the_clock_module_only():
    """`first_of` and `within` wait for the losers; a race written by hand forgets them sooner or later."""
    racing = [str(path) for path in sources() if "FIRST_COMPLETED" in (ROOT / path).read_text()]
    assert racing == ["headrace/clock.py"]


def test_nothing_imports_what_stands_to_its_left():
    wrong = []
    for path in sources():
        left = PACKAGES[: PACKAGES.index(path.parts[0])]
        wrong += [f"{path} imports {package}" for package in left if takes(path, package)]
    assert wrong == []


def test_no_arrow_goes_up():
    rank = {room: place for place, room in enumerate(ORDER)}
    inside = {module: asked for module, asked in house().items() if module not in EVERYTHING}
    assert {room_of(module) for module in inside} == set(ORDER), "every room has its place, and every place a room"
    up = [
        f"{module} imports {other}"
        for module, asked in inside.items()
        for other in asked
        if other not in EVERYTHING and rank[room_of(other)] > rank[room_of(module)]
    ]
    assert up == []


def test_no_file_imports_itself_by_way_of_others():
    left = {module: set(asked) for module, asked in house().items()}
    while ends := [module for module, asked in left.items() if not asked]:
        for module in ends:
            del left[module]
        for asked in left.values():
            asked.difference_update(ends)
    assert left == {}, "what is left imports itself, or what does"


def test_nobody_imports_the_command_line():
    users = {x for x, asked in house().items() if any(room_of(y) == "headrace.cli" for y in asked)}
    assert {x for x in users if room_of(x) != "headrace.cli"} == set()


def test_services_reach_kernels_only_through_headrace():
    assert [str(path) for path in sources() if path.parts[0] == "services" and takes(path, "kernels")] == []


def test_a_service_never_imports_another():
    wrong = []
    for path in (path for path in sources() if path.parts[0] == "services" and len(path.parts) > 2):
        others = {name.split(".")[1] for name in imports(path) if name.startswith("services.")} - {path.parts[1]}
        allowed = COMPOSITION_ROOTS.get(path.as_posix(), ())
        wrong += [f"{path} imports services.{other}" for other in others if f"services.{other}" not in allowed]
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
