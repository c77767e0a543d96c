"""Which backend answers a request: several engines of this process, and upstreams elsewhere."""
