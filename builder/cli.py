"""The ``specbuild`` command."""

from __future__ import annotations

import click

from specrun.commands import LazyGroup


@click.group(
    cls=LazyGroup,
    lazy={
        "compile": "specbuild.commands.compile:compile_command",
        "inspect": "specbuild.commands.inspect:inspect_command",
        "check": "specbuild.commands.check:check_command",
        "prove": "specbuild.commands.prove:prove_command",
        "doctor": "specbuild.commands.doctor:doctor_command",
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="specbuild", prog_name="specbuild")
def main() -> None:
    """Compile a language model and its drafters into a bundle of engines."""
