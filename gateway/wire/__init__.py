"""What goes over the wire: requests, responses, errors, validation."""
