"""The ``specrun`` command."""

from __future__ import annotations

import click

from specrun.commands import LazyGroup


@click.group(
    cls=LazyGroup,
    lazy={
        "generate": "specrun.commands.generate:generate",
        "chat": "specrun.commands.chat:chat",
        "bench": "specrun.commands.bench:bench",
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="specbuild", prog_name="specrun")
def main() -> None:
    """Decode with a compiled bundle: draft, verify, commit, emit, losslessly."""
