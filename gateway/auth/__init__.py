"""Who may ask, and for how much: API keys, scopes, limits by key."""
