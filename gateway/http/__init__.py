"""The server: connections, limits, the Litestar app."""
