"""``medusa-gateway bench telemetry``: what traces, metrics and logs cost, in tokens per second and CPU time."""
