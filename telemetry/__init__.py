"""Traces, metrics, alerts and logs."""
