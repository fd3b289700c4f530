"""ZeRO-1 whose communication overlaps with the compute of its own step."""
