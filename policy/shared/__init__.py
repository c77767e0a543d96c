"""What replicas share: the Redis client, the embedded Valkey, stores on it."""
