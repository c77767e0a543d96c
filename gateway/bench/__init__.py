"""Measuring harnesses that need a whole gateway; no part of serving imports them."""
