"""Limits by API key."""
