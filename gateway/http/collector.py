"""Python's cyclic garbage collector, in a process that serves."""

from __future__ import annotations

import gc


def spare_the_collector() -> None:
    """To be called once all is loaded.

    The collector stops everybody while it goes through all objects, and it does so again and again while a large
    request is read: with torch loaded, for half a second each time. So it leaves out what is there by now, which stays,
    and comes later; the objects of requests are mostly freed without it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
