"""What heads are trained on."""
