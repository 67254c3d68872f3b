"""Options and fixtures every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import config as configuration

configuration.apply_environment(configuration.THREAD_ENVIRONMENT)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--full` runs the counts the acceptance list names instead of those that fit a laptop's patience."""
    parser.addoption("--full", action="store_true", help="full counts, as in `make test-full`")
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
