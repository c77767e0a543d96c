"""The continuously batched loop: scheduling, pages, one thread, and what one request is."""
