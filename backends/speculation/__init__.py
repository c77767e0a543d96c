"""Which tokens to draft: candidates from heads and text, trees, and when to do without."""
