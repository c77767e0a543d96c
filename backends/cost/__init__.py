"""What a step costs on this device: measured, kept, corrected while serving."""
