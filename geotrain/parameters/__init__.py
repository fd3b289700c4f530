"""The model's parameters: names, addresses, chunks; initial values and files."""
