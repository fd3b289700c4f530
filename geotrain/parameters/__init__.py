"""The model's parameters: names, addresses, pieces; initial values and files."""
