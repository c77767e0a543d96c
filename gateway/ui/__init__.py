"""The page for people: files that run in a browser and ask this gateway's own API. They hold no data themselves."""
