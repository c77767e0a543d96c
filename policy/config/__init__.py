"""Strict YAML files: reading, fields, problems with line and path, watching for edits."""
