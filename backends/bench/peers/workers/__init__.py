"""What runs inside a peer's own environment: by path, never imported by the gateway."""
