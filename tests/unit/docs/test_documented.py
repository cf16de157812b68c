"""A setting, command, route or public name that the documentation does not know is a failure."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from app.cli import app as cli
from app.server import create_app
from app.settings import Settings

DOCS = Path(__file__).parents[3] / "docs"
README = Path(__file__).parents[3] / "README.md"


def settings_table() -> str:
    """The table of docs/settings.md, made from the code."""
    rows = ["| setting | default | what it is |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = "" if field.default is None else f"`{field.default}`"
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(rows)


def test_the_settings_table_is_the_codes_own():
    assert settings_table() in (DOCS / "settings.md").read_text(), settings_table()


def commands() -> list[str]:
    group = get_command(cli)
    names = []
    for name, command in group.commands.items():
        names += [f"{name} {sub}" for sub in getattr(command, "commands", {})] or [name]
    return names


@pytest.mark.parametrize("command", commands())
def test_each_command_and_its_options_are_documented(command):
    text = (DOCS / "commands.md").read_text()
    assert f"## `dflash-rag {command}`" in text
    section = text.split(f"## `dflash-rag {command}`")[1].split("\n## ")[0]
    found = get_command(cli)
    for part in command.split():
        found = found.commands[part]
    for option in (o for p in found.params for o in p.opts if o.startswith("--")):
        if option not in ("--help", "--home"):
            assert f"`{option}`" in section, f"{command}: {option}"


def test_no_command_is_documented_that_does_not_exist():
    documented = re.findall(r"^## `dflash-rag ([^`]+)`", (DOCS / "commands.md").read_text(), re.M)
    assert sorted(documented) == sorted(commands())


def test_each_route_is_documented():
    text = (DOCS / "http.md").read_text()
    routes = create_app(Settings()).openapi()["paths"]
    assert routes
    for path, methods in routes.items():
        for method in methods:
            assert f"## `{method.upper()} {path}`" in text


def test_relative_links_lead_somewhere():
    for page in [README, *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
