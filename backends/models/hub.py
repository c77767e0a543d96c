"""Models and heads by name: a local folder, or an id on the hub, which may be out of reach."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


def is_path(name: str) -> bool:
    """It can't be an id of the hub, which is ``name`` or ``owner/name``."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).exists()


def settle_for_the_cache(name: str) -> None:
    """If the hub can't be reached, have its client look into its cache only.

    It would otherwise try each file six times over half a minute, and tell of each try twice. A hub that is slow is
    another matter: its client may wait for it.
    """
    if Path(name).is_dir():
        return
    from httpx2 import ConnectError
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=10.0)
    except ConnectError as error:
        log.warning("%s can't be reached (%s); %s is looked for in the cache", constants.ENDPOINT, error, name)
        constants.HF_HUB_OFFLINE = True
    except Exception as error:
        log.debug("the hub was asked in vain, its client may do better: %s", type(error).__name__)
