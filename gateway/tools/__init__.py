"""Tools and thoughts in a model's own words: how they are put to it, and how its text is read. Pure."""
