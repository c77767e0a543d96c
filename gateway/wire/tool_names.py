"""How a tool may be called."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]
