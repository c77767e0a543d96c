"""What an operator decides and what the fleet has measured: the decoding policy (no torch, no HTTP)."""
