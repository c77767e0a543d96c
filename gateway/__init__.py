"""HTTP side of medusa-gateway: OpenAI-compatible API, admission, streaming and the command line."""
