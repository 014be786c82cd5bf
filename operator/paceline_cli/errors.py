"""How a command ends when it cannot do its work: exit code and the lines for stderr. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT = 0, 1, 2


class CliError(Exception):
    """Ends the command with `exit_code`; each message is one line on stderr: what, why, what to do."""

    exit_code = EXIT_FAILED

    def __init__(self, *messages: str) -> None:
        super().__init__("; ".join(messages))
        self.messages: Sequence[str] = messages


class BadInput(CliError):
    """The user's files, flags or machine are not as the command needs them."""

    exit_code = EXIT_BAD_INPUT
