"""Backends elsewhere: any server that speaks OpenAI's API, asked over HTTP."""
