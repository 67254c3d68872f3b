"""The README's example runs as it stands, but for the address; so do the commands it shows."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_readmes_python_example_runs_as_it_stands(mesh, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 1
    scope: dict[str, object] = {}
    exec(compile(blocks[0].replace("127.0.0.1:20600", mesh.router_address), str(README), "exec"), scope)
    assert scope["answer"].final.usage.generated_tokens > 0
    assert capsys.readouterr().out.strip()


def test_every_command_the_readme_shows_exists():
    from typer.testing import CliRunner

    from headrace.cli.main import app

    shown = set(re.findall(r"^\.venv/bin/headrace (\w+)", README.read_text(), re.MULTILINE))
    assert {"up", "generate", "chat", "trace", "eval", "doctor", "bench"} <= shown
    for command in shown:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_every_link_in_the_readme_and_docs_leads_somewhere():
    for page in (README, *README.parent.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
