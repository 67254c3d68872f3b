"""buf's rules for the protos: their style, and that whoever speaks the released ones is still understood."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUF = ROOT / "tests/buf/node_modules/.bin/buf"
BASELINE = ROOT / "protos/baseline.binpb"


@pytest.fixture(scope="module", autouse=True)
def buf_is_installed() -> None:
    """`make test` installs buf wherever npm is; a host that has npm and no buf has skipped a step."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm, through which `make test` installs buf")
    assert BUF.exists(), "run `make buf`"


def buf(*arguments: str, directory: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs buf in a directory with a buf.yaml."""
    return subprocess.run([str(BUF), *arguments], cwd=directory, capture_output=True, text=True, timeout=60)


def breaking(directory: Path) -> subprocess.CompletedProcess[str]:
    """Compares the protos below `directory` with the released ones."""
    return buf("breaking", "--against", str(BASELINE), directory=directory)


@pytest.fixture
def changed(tmp_path):
    """`changed(name, old, new)` copies the protos with one replacement, and returns the copy's directory."""

    def change(name: str, old: str, new: str) -> Path:
        shutil.copy(ROOT / "buf.yaml", tmp_path)
        shutil.copytree(ROOT / "protos", tmp_path / "protos")
        path = tmp_path / "protos/headrace/v1" / name
        text = path.read_text()
        assert text.count(old) == 1, f"{name} has {text.count(old)} times {old!r}"
        path.write_text(text.replace(old, new))
        return tmp_path

    return change


def test_the_protos_are_in_the_style_that_buf_checks():
    found = buf("lint")
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_a_field_without_a_comment_is_found(changed):
    found = buf("lint", directory=changed("link.proto", "  // For people.\n", ""))
    assert found.returncode != 0
    assert '"message" should have a non-empty comment' in found.stdout


def test_whoever_speaks_the_released_protos_is_still_understood():
    found = breaking(ROOT)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "old", "new", "complaint"),
    [
        ("link.proto", "string reason = 2;", "string reason = 7;", 'field "2" with name "reason"'),
        ("link.proto", "bool retryable = 6;", "int32 retryable = 6;", 'Field "6" with name "retryable"'),
        ("common.proto", "FINISH_REASON_STOP = 2;", "FINISH_REASON_STOP = 7;", 'enum value "2"'),
        (
            "prefill.proto",
            "rpc GetPrefillInfo(GetPrefillInfoRequest)",
            "rpc GetPrefillInfo(stream GetPrefillInfoRequest)",
            'RPC "GetPrefillInfo"',
        ),
    ],
)
def test_a_change_that_older_peers_cannot_read_is_found(changed, name, old, new, complaint):
    found = breaking(changed(name, old, new))
    assert found.returncode != 0
    assert complaint in found.stdout


def test_a_new_field_breaks_nobody(changed):
    directory = changed(
        "link.proto", "  bool retryable = 6;\n", "  bool retryable = 6;\n  // New.\n  string hint = 7;\n"
    )
    found = breaking(directory)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_lock_pins_by_hash_and_names_no_registry():
    lock = (ROOT / "tests/buf/package-lock.json").read_text()
    assert "://" not in lock and '"resolved"' not in lock
    assert lock.count('"integrity"') == lock.count('"node_modules/')
