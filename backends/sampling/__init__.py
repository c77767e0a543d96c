"""Drawing tokens, and verifying drafts by drawing (sample and match)."""
