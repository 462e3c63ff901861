"""What the commands of specrun and specbuild share: lazy loading of a command's module, and how errors leave."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import click

from specrun.errors import UserError
from specrun.plugins.errors import ContractError


class LazyGroup(click.Group):
    """A group whose commands are ``module:attribute`` strings, imported when used: ``--help`` stays fast.

    UserError becomes one paragraph on stderr and exit code 2; Ctrl-C exit code 130; a closed pipe exit code 141.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = dict(lazy)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (UserError, ContractError) as error:
            click.echo(click.style("Error: ", fg="red", bold=True) + str(error), err=True)
            sys.exit(UserError.exit_code)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            sys.exit(130)
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(141)
