"""How a command says that it can't go on."""


class CommandError(Exception):
    """Something the user can mend: told in one line, without a traceback."""
