"""What commands that run a user's script have in common: options first, then the script and whatever is its own."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

CONTEXT_SETTINGS = {"allow_interspersed_args": False}


class ScriptCommand(TyperCommand):
    """Parses as python does: after the script, or after ``-m MODULE``, nothing is an option of ours any more."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Ends our options behind ``-m MODULE``; a script ends them by itself."""
        return super().parse_args(ctx, self._end_options(args))

    def _end_options(self, args: list[str]) -> list[str]:
        takes_value = {
            name: not getattr(param, "is_flag", False) for param in self.params for name in getattr(param, "opts", ())
        }
        index = 0
        while index < len(args) and args[index].startswith("-") and args[index] != "--":
            if args[index] == "-m":
                return [*args[: index + 2], "--", *args[index + 2 :]]
            index += 2 if takes_value.get(args[index], False) else 1
        return args
