"""How a command says that it can't go on."""


class CommandError(Exception):
    """Something the user can mend: :func:`gateway.cli.main` tells it in one line on standard error, without a
    traceback, and the exit status is 2. Every command raises this, or lets an OSError that names its file pass.

    Status 1 is for what a command finds: a file that is refused, a difference.
    """
