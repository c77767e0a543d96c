"""Alert rules: evaluated, shared by the fleet, delivered, and printed for Prometheus."""
