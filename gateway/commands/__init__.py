"""Subcommands of ``medusa-gateway``, one module each."""
