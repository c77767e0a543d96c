"""Live acceptance statistics: raw counts, windows, estimates, their exchange between replicas."""
