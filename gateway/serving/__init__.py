"""One request from its body to its answer, and what runs beside requests."""
