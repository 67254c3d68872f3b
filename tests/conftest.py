"""Options and fixtures every test may use."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

from headrace import config as configuration

configuration.apply_environment(configuration.THREAD_ENVIRONMENT)  # before torch is loaded

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton when the first file of kernels/ is imported, hence here


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--full` runs the counts the acceptance list names instead of those that fit a laptop's patience."""
    parser.addoption("--full", action="store_true", help="full counts, as in `make test-full`")
    parser.addoption("--summary", default="", help="write counts and seconds of every test file to this JSON file")
    parser.addoption("--checkpoint", default="", help="serve this directory instead of models/tiny")


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether full counts were asked for."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def tiny_directory(request: pytest.FixtureRequest) -> Path:
    """The shipped checkpoint, or the one given by `--checkpoint`."""
    given = request.config.getoption("--checkpoint")
    if given:
        return Path(given).absolute()
    return Path(__file__).resolve().parent.parent / "models" / "tiny"


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """`--summary FILE`: what ran, file by file."""
    target = config.getoption("--summary")
    if not target:
        return
    files: dict[str, dict[str, float]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            row = files.setdefault(report.nodeid.partition("::")[0], {"seconds": 0.0})
            row[outcome] = row.get(outcome, 0) + 1
            row["seconds"] = round(row["seconds"] + report.duration, 1)
    totals = {
        key: round(sum(row.get(key, 0) for row in files.values()), 1)
        for key in ("passed", "failed", "error", "skipped")
    }
    summary = {
        "command": " ".join(config.invocation_params.args),
        "full": config.getoption("--full"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **totals,
        "files": dict(sorted(files.items())),
    }
    Path(target).write_text(json.dumps(summary, indent=1) + "\n")
