"""Process groups, devices, and what a rank owns."""
